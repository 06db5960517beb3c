"""The one generator of CUTLASS C++: from a kernel's description to a source file that a person can read.

Owns what is written: types, tile, cluster, schedule and the epilogue's tree as ``using`` lines, then a body that is the
same for all kernels of a kind, with the C interface. Which kernels there are is ``cpp_choices``', how they are compiled
``build``'s, how they are called ``cpp_program``'s. CUTLASS' device-level adapter is not used: its headers include those
of every architecture, which costs the compiler seconds per kernel, and what it does is a launch.

The C interface, all that a library offers (``Call`` is laid out in ``cpp_library``):

    facts(text, size)               JSON: versions, stages, threads, shared memory, instruction, tile of the epilogue
    prepared_bytes()                host memory of a prepared call
    workspace_bytes(call)           device memory of a call
    can_implement(call)             whether the collectives take the call's sizes and alignments
    prepare(prepared, call)         tensor maps and schedule of a call, into host memory; a cudaError_t
    run(prepared, stream)           the call's launches; a cudaError_t
"""

from __future__ import annotations

from impls.cutlass.cpp_choices import Kernel
from impls.workloads.dtypes import dtype

_ELEMENT = {
    "f32": "float",
    "tf32": "cutlass::tfloat32_t",
    "f16": "cutlass::half_t",
    "bf16": "cutlass::bfloat16_t",
    "f8e4m3": "cutlass::float_e4m3_t",
    "i8": "int8_t",
    "i32": "int32_t",
}
# Schedule -> the mainloop's and the epilogue's name for it, and the kernel's header.
_SCHEDULES = {
    "cooperative": (
        "TmaWarpSpecializedCooperative",
        "TmaWarpSpecializedCooperative",
        "sm90_gemm_tma_warpspecialized_cooperative",
    ),
    "pingpong": ("TmaWarpSpecializedPingpong", "TmaWarpSpecialized", "sm90_gemm_tma_warpspecialized_pingpong"),
    "cp_async": (
        "CpAsyncWarpSpecializedCooperative",
        "TmaWarpSpecializedCooperative",
        "sm90_gemm_warpspecialized_cooperative",
    ),
}

# Widths of the wgmma instructions that CuTe declares unasked. The others' declarations are twice as long as all of its
# own together, and without them it would cut a tile of 208 columns into 13 instructions of 16.
_DECLARED_WIDTHS = (8, 16, 32, 64, 96, 128, 192, 256)

_HEAD = """\
// {title}
// Written by impls/cutlass/kernels/cpp_source.py.
{widths}#include <cstdio>
#include <new>

#include "cutlass/cutlass.h"
#include "cutlass/version.h"
#include "cutlass/device_kernel.h"
#include "cutlass/gemm/gemm.h"
#include "cutlass/gemm/kernel/gemm_universal_decl.h"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"
#include "cutlass/gemm/collective/collective_mma_decl.hpp"
#include "cutlass/gemm/collective/{mainloop}.hpp"
#include "cutlass/gemm/collective/builders/sm90_gmma_builder.inl"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/{kernel}.hpp"

using namespace cute;

// {orientation}
using ElementA = {element};
using ElementB = {element};
using ElementD = {out};
using ElementAccumulator = {accumulator};
using ElementCompute = {compute};  // of the epilogue
using LayoutA = cutlass::layout::{layout_a};
using LayoutB = cutlass::layout::{layout_b};
using LayoutD = cutlass::layout::{layout_d};

// Level of the tile: what a block computes at a time, and the blocks that share what they load.
using TileShape = Shape<_{m}, _{n}, _{k}>;
using ClusterShape = Shape<_{cluster_m}, _{cluster_n}, _1>;
using TileScheduler = cutlass::gemm::{scheduler};
// Level of the warp: which warps load, which multiply, who writes C.
using MainloopSchedule = cutlass::gemm::Kernel{schedule};
using EpilogueSchedule = cutlass::epilogue::{epilogue_schedule};
"""

_GELU = """
// GELU in its tanh form. Of 16-bit results tanh.approx (2^-11 at most, PTX ISA) is exact enough; others take
// x sigmoid(2u), the same function.
template <class T> struct TanhGelu;
template <> struct TanhGelu<float> {
  CUTLASS_DEVICE float operator()(float x) const {
    float u = x * (0.7978845608028654f + 0.035677408136300125f * x * x);
    if constexpr (sizeof(ElementD) == 2) {
      float t;
      asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(u));
      float h = 0.5f * x;
      return h + h * t;
    } else {
      return x / (1.0f + __expf(-2.0f * u));
    }
  }
};
template <int N> struct TanhGelu<cutlass::Array<float, N>> {
  CUTLASS_DEVICE cutlass::Array<float, N> operator()(cutlass::Array<float, N> const& x) const {
    cutlass::Array<float, N> y;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < N; ++i) { y[i] = TanhGelu<float>{}(x[i]); }
    return y;
  }
};
"""

_EPILOGUE = """
// Epilogue: {what}, as a tree of visitors over the accumulators.
using namespace cutlass::epilogue::fusion;
constexpr auto Round = cutlass::FloatRoundStyle::round_to_nearest;
using Accumulators = Sm90AccFetch;
{lines}
using ElementC = {source};
"""

_COLLECTIVES = """
using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
    cutlass::epilogue::collective::EpilogueTileAuto, ElementAccumulator, ElementCompute,
    ElementC, LayoutD{pointer}, 16 / sizeof(ElementD), ElementD, LayoutD{pointer}, 16 / sizeof(ElementD),
    EpilogueSchedule, Epilogue>::CollectiveOp;
using CollectiveMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    ElementA, LayoutA{pointer}, 16 / sizeof(ElementA), ElementB, LayoutB{pointer}, 16 / sizeof(ElementB),
    ElementAccumulator, TileShape, ClusterShape,
    cutlass::gemm::collective::StageCountAutoCarveout<
        static_cast<int>(sizeof(typename CollectiveEpilogue::SharedStorage))>,
    MainloopSchedule>::CollectiveOp;
using GemmKernel = cutlass::gemm::kernel::GemmUniversal<
    {problem}, CollectiveMainloop, CollectiveEpilogue, TileScheduler>;
"""

_INTERFACE = """
// One call. Sizes are the C++ product's.
struct Call {
  void const* a;
  void const* b;
  void const* addend;       // bias or residual
  void* d;
  int const* group_sizes;   // on the device; null without groups
  void* workspace;
  int m, n, k, batch;       // with groups: m is the sum of their sizes, batch their number
  int raster;               // 0: the scheduler's heuristic, 1: along M, 2: along N
  int swizzle;              // blocks walked together, at most
  int splits;               // equal parts of K; 0 leaves it to stream-K
  int multiprocessors;
};

// Level of the instruction, and what the levels above came to.
extern "C" void facts(char* text, int size) {
  using Mma = typename CollectiveMainloop::TiledMma;
  auto instruction = typename Mma::AtomShape_MNK{};
  std::snprintf(text, size,
      "{\\"cutlass\\": \\"%d.%d.%d\\", \\"nvcc\\": \\"%d.%d.%d\\", \\"stages\\": %d, \\"threads\\": %d, "
      "\\"consumer_warpgroups\\": %d, \\"shared_bytes\\": %d, \\"instruction\\": [%d, %d, %d]}",
      CUTLASS_MAJOR, CUTLASS_MINOR, CUTLASS_PATCH,
      __CUDACC_VER_MAJOR__, __CUDACC_VER_MINOR__, __CUDACC_VER_BUILD__,
      int(CollectiveMainloop::DispatchPolicy::Stages), int(GemmKernel::MaxThreadsPerBlock),
      int(cute::size(Mma{})) / 128, int(GemmKernel::SharedStorageSize),
      int(get<0>(instruction)), int(get<1>(instruction)), int(get<2>(instruction)));
}
"""

_PLAIN = """
template <class Stride> Stride packed(int rows, int columns) {
  Stride stride{};
  if constexpr (is_static<decltype(get<0>(stride))>::value) {
    get<1>(stride) = rows;
  } else {
    get<0>(stride) = columns;
  }
  get<2>(stride) = static_cast<int64_t>(rows) * columns;
  return stride;
}

typename GemmKernel::Arguments arguments(Call const& call) {
  typename GemmKernel::Arguments args{};
  args.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  args.problem_shape = {call.m, call.n, call.k, call.batch};
  args.mainloop.ptr_A = static_cast<decltype(args.mainloop.ptr_A)>(call.a);
  args.mainloop.dA = packed<typename GemmKernel::StrideA>(call.m, call.k);
  args.mainloop.ptr_B = static_cast<decltype(args.mainloop.ptr_B)>(call.b);
  args.mainloop.dB = packed<typename GemmKernel::StrideB>(call.n, call.k);
  args.epilogue.thread = @tree@;
  args.epilogue.ptr_C = static_cast<decltype(args.epilogue.ptr_C)>(@source@);
  args.epilogue.dC = packed<typename GemmKernel::StrideC>(call.m, call.n);
  args.epilogue.ptr_D = static_cast<ElementD*>(call.d);
  args.epilogue.dD = packed<typename GemmKernel::StrideD>(call.m, call.n);
  args.hw_info.sm_count = call.multiprocessors;
@schedule@  return args;
}

void fill(Call const&, cudaStream_t) {}
"""

_GROUPED = """
// What CUTLASS reads of each group, in the workspace.
using Sizes = typename GemmKernel::ProblemShape::UnderlyingProblemShape;
using StrideA = typename GemmKernel::InternalStrideA;
using StrideB = typename GemmKernel::InternalStrideB;
using StrideD = typename GemmKernel::InternalStrideD;
struct Group {
  Sizes* sizes;
  ElementA const** a;
  ElementB const** b;
  ElementD** d;
  StrideA* stride_a;
  StrideB* stride_b;
  StrideD* stride_d;
};

constexpr int64_t kMostGroupBytes = 128;  // of one group, in all

Group laid_out(Call const& call) {
  char* at = static_cast<char*>(call.workspace);
  auto take = [&](int64_t bytes) {
    char* begin = at;
    at += (bytes * call.batch + 15) / 16 * 16;
    return static_cast<void*>(begin);
  };
  Group g;
  g.sizes = static_cast<Sizes*>(take(sizeof(Sizes)));
  g.a = static_cast<ElementA const**>(take(8));
  g.b = static_cast<ElementB const**>(take(8));
  g.d = static_cast<ElementD**>(take(8));
  g.stride_a = static_cast<StrideA*>(take(sizeof(StrideA)));
  g.stride_b = static_cast<StrideB*>(take(sizeof(StrideB)));
  g.stride_d = static_cast<StrideD*>(take(sizeof(StrideD)));
  return g;
}

int64_t own_bytes(Call const& call) { return (call.batch * kMostGroupBytes + 127) / 128 * 128; }

template <class Stride> CUTLASS_DEVICE void set(Stride& stride, int64_t leading) {
  if constexpr (is_static<decltype(get<0>(stride))>::value) {
    get<1>(stride) = leading;
  } else {
    get<0>(stride) = leading;
  }
}

// The groups' sizes are known to the device alone: each call reads them.
__global__ void fill_groups(Group g, Call call) {
  int group = blockIdx.x * blockDim.x + threadIdx.x;
  if (group >= call.batch) { return; }
  int64_t first = 0;
  for (int other = 0; other < group; ++other) { first += call.group_sizes[other]; }
  int rows = call.group_sizes[group];
  g.sizes[group] = Sizes{rows, call.n, call.k};
  g.a[group] = static_cast<ElementA const*>(call.a) + first * call.k;
  g.b[group] = static_cast<ElementB const*>(call.b) + static_cast<int64_t>(group) * call.n * call.k;
  g.d[group] = static_cast<ElementD*>(call.d) + first * call.n;
  set(g.stride_a[group] = {}, call.k);
  set(g.stride_b[group] = {}, @leading_b@);
  set(g.stride_d[group] = {}, call.n);
}

typename GemmKernel::Arguments arguments(Call const& call) {
  Group g = laid_out(call);
  typename GemmKernel::Arguments args{};
  args.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
  args.problem_shape = {call.batch, g.sizes, nullptr};
  args.mainloop.ptr_A = g.a;
  args.mainloop.dA = g.stride_a;
  args.mainloop.ptr_B = g.b;
  args.mainloop.dB = g.stride_b;
  args.epilogue.thread = @tree@;
  args.epilogue.ptr_D = g.d;
  args.epilogue.dD = g.stride_d;
  args.hw_info.sm_count = call.multiprocessors;
@schedule@  return args;
}

void fill(Call const& call, cudaStream_t stream) {
  fill_groups<<<(call.batch + 127) / 128, 128, 0, stream>>>(laid_out(call), call);
}
"""

_SCHEDULE = """\
  using Raster = decltype(args.scheduler.raster_order);
  args.scheduler.raster_order =
      call.raster == 1 ? Raster::AlongM : call.raster == 2 ? Raster::AlongN : Raster::Heuristic;
  args.scheduler.max_swizzle_size = call.swizzle;
"""
_STREAM_K = """\
  using Mode = decltype(args.scheduler.decomposition_mode);
  args.scheduler.splits = call.splits > 0 ? call.splits : 1;
  args.scheduler.decomposition_mode = call.splits > 0 ? Mode::SplitK : Mode::StreamK;
"""

_CALLS = """
struct Prepared {
  Call call;
  typename GemmKernel::Arguments arguments;
  typename GemmKernel::Params params;
};

extern "C" int64_t prepared_bytes() { return sizeof(Prepared); }

extern "C" int64_t workspace_bytes(Call const* call) {
  return @own@ + static_cast<int64_t>(GemmKernel::get_workspace_size(arguments(*call)));
}

extern "C" int can_implement(Call const* call) { return GemmKernel::can_implement(arguments(*call)); }

extern "C" int prepare(void* memory, Call const* call) {
  auto args = arguments(*call);
  char* rest = static_cast<char*>(call->workspace) + @own@;
  new (memory) Prepared{*call, args, GemmKernel::to_underlying_arguments(args, rest)};
  return cudaFuncSetAttribute(cutlass::device_kernel<GemmKernel>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              GemmKernel::SharedStorageSize);
}

extern "C" int run(void* memory, cudaStream_t stream) {
  auto& prepared = *static_cast<Prepared*>(memory);
  Call const& call = prepared.call;
  fill(call, stream);
  // Stream-K counts in the workspace who has added to a tile, from zero in every call.
  char* rest = static_cast<char*>(call.workspace) + @own@;
  if (GemmKernel::initialize_workspace(prepared.arguments, rest, stream) != cutlass::Status::kSuccess) {
    return cudaGetLastError();
  }
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {size<0>(ClusterShape{}), size<1>(ClusterShape{}), 1};
  cudaLaunchConfig_t config{GemmKernel::get_grid_shape(prepared.params), GemmKernel::get_block_shape(),
                            static_cast<size_t>(GemmKernel::SharedStorageSize), stream, &cluster, 1};
  return cudaLaunchKernelEx(&config, cutlass::device_kernel<GemmKernel>, prepared.params);
}
"""


def source(kernel: Kernel) -> str:
    """The .cu file of a kernel."""
    schedule, epilogue_schedule, header = _SCHEDULES[kernel.schedule]
    scheduler = "StreamKScheduler" if kernel.stream_k else "PersistentScheduler"
    if kernel.grouped:
        schedule, epilogue_schedule = f"PtrArray{schedule}", f"PtrArray{_SCHEDULES[kernel.schedule][0]}"
        header, scheduler = header.replace("gemm_tma", "gemm_array_tma"), "GroupScheduler"
    # By cp.async no sums are promoted.
    if kernel.dtype == "f8e4m3" and kernel.acc == "fast" and kernel.schedule != "cp_async":
        schedule += "FP8FastAccum"
    mainloop = _mainloop(kernel)
    orientation = (
        "D = A B is the transposed C of the case: its A is our B, its B our A."
        if kernel.swapped
        else "D = A B is the C of the case."
    )
    head = _HEAD.format(
        title=kernel.name,
        widths="" if kernel.n in _DECLARED_WIDTHS else "#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED\n",
        mainloop=mainloop,
        kernel=header,
        orientation=orientation,
        element=_ELEMENT[kernel.dtype],
        out=_ELEMENT[kernel.out],
        accumulator={"f16": "cutlass::half_t", "i32": "int32_t"}.get(kernel.acc, "float"),
        compute="int32_t" if kernel.acc == "i32" else "float",
        # In CUTLASS' words a RowMajor A is K-major, a RowMajor B is N-major.
        layout_a="RowMajor" if kernel.a_k_major else "ColumnMajor",
        layout_b="ColumnMajor" if kernel.b_k_major else "RowMajor",
        layout_d="ColumnMajor" if kernel.swapped else "RowMajor",
        m=kernel.m,
        n=kernel.n,
        k=kernel.k,
        cluster_m=kernel.cluster_m,
        cluster_n=kernel.cluster_n,
        scheduler=scheduler,
        schedule=schedule,
        epilogue_schedule=epilogue_schedule,
    )
    collectives = _COLLECTIVES.format(
        pointer="*" if kernel.grouped else "",
        problem="cutlass::gemm::GroupProblemShape<Shape<int, int, int>>"
        if kernel.grouped
        else "Shape<int, int, int, int>",
    )
    body = _GROUPED if kernel.grouped else _PLAIN
    for mark, text in (
        ("@tree@", _arguments(kernel)),
        ("@source@", "call.addend" if kernel.epilogue == "residual" else "nullptr"),
        ("@schedule@", _SCHEDULE + (_STREAM_K if kernel.stream_k else "")),
        ("@leading_b@", "call.k" if kernel.b_k_major else "call.n"),
    ):
        body = body.replace(mark, text)
    calls = _CALLS.replace("@own@", "own_bytes(*call)" if kernel.grouped else "0")
    calls = calls.replace("call.workspace) + own_bytes(*call)", "call.workspace) + own_bytes(call)")
    gelu = _GELU if kernel.epilogue == "bias+gelu" else ""
    return head + gelu + _tree(kernel) + collectives + _INTERFACE + body + calls


def _mainloop(kernel: Kernel) -> str:
    """The header of the collective that multiplies."""
    # wgmma takes operands of other than two bytes K-major; A may go through registers, where it is transposed.
    through_registers = dtype(kernel.dtype).bytes != 2 and not (kernel.a_k_major and kernel.b_k_major)
    operands = "rs" if through_registers else "ss"
    if kernel.schedule == "cp_async":
        return f"sm90_mma_multistage_gmma_{operands}_warpspecialized"
    promoted = kernel.dtype == "f8e4m3" and kernel.acc != "fast"
    array = "array_" if kernel.grouped else ""
    return f"sm90_mma_{array}tma_gmma_{operands}_warpspecialized" + ("_fp8" if promoted else "")


def _tree(kernel: Kernel) -> str:
    """The epilogue's tree of visitors, and the type of what it reads as C."""
    what = {
        "none": "D = A B",
        "bias": "D = A B + bias",
        "bias+relu": "D = ReLU(A B + bias)",
        "bias+gelu": "D = GELU(A B + bias)",
        "residual": "D = A B + residual",
    }[kernel.epilogue]
    broadcast = (
        "Sm90ColBroadcast<0, TileShape, ElementD, ElementCompute, Stride<_1, _0, int64_t>>"
        if kernel.swapped
        else "Sm90RowBroadcast<0, TileShape, ElementD, ElementCompute, Stride<_0, _1, int64_t>>"
    )
    lines = [f"using Bias = {broadcast};"] if kernel.epilogue.startswith("bias") else []
    if kernel.epilogue in ("bias+relu", "bias+gelu"):
        lines.append(
            "using Biased = Sm90EVT<Sm90Compute<cutlass::plus, ElementCompute, ElementCompute, Round>, "
            "Bias, Accumulators>;"
        )
    function, operands = {
        "none": ("cutlass::epilogue::thread::Identity", "Accumulators"),
        "bias": ("cutlass::plus", "Bias, Accumulators"),
        "bias+relu": ("cutlass::epilogue::thread::ReLu", "Biased"),
        "bias+gelu": ("TanhGelu", "Biased"),
        "residual": ("cutlass::plus", "Sm90SrcFetch<ElementD>, Accumulators"),
    }[kernel.epilogue]
    lines.append(f"using Epilogue = Sm90EVT<Sm90Compute<{function}, ElementD, ElementCompute, Round>, {operands}>;")
    source_type = "ElementD" if kernel.epilogue == "residual" else "void"
    return _EPILOGUE.format(what=what, lines="\n".join(lines), source=source_type)


def _arguments(kernel: Kernel) -> str:
    """The initialiser of the tree's arguments: of a node's children, then its own."""
    bias = "{static_cast<ElementD const*>(call.addend)}"
    return {
        "none": "{{}, {}}",
        "bias": f"{{{bias}, {{}}, {{}}}}",
        "bias+relu": f"{{{{{bias}, {{}}, {{}}}}, {{}}}}",
        "bias+gelu": f"{{{{{bias}, {{}}, {{}}}}, {{}}}}",
        "residual": "{{}, {}, {}}",
    }[kernel.epilogue]
