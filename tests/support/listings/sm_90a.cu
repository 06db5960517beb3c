// One kernel for each technique of machine_code's families; what stands in each is known from its inline PTX.
// sm_90a.sass is the listing, sm_90a.ptx the PTX, that CUDA 13.0 makes of it.
#include <cuda.h>
#include <cstdint>
extern "C" __global__ void __launch_bounds__(128) product(float* out, uint64_t a, uint64_t b) {
  float d[32] = {};
  asm volatile("wgmma.fence.sync.aligned;");
#define L(i) "+f"(d[i]), "+f"(d[i+1]), "+f"(d[i+2]), "+f"(d[i+3]), "+f"(d[i+4]), "+f"(d[i+5]), "+f"(d[i+6]), "+f"(d[i+7])
  asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, p, 1, 1, 0, 0;}\n"
    : L(0), L(8), L(16), L(24) : "l"(a), "l"(b));
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;");
  for (int i = 0; i < 32; ++i) out[threadIdx.x * 32 + i] = d[i];
}
extern "C" __global__ void __cluster_dims__(2,1,1) tma(const __grid_constant__ CUtensorMap map, float* out) {
  extern __shared__ __align__(128) float tile[];
  __shared__ uint64_t full;
  uint32_t bar = (uint32_t)__cvta_generic_to_shared(&full), dst = (uint32_t)__cvta_generic_to_shared(tile);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar));
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 4096;" :: "r"(bar));
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" :: "r"(dst), "l"(&map), "r"(0), "r"(0), "r"(bar), "h"((uint16_t)3) : "memory");
  }
  asm volatile("{ .reg .pred p; w: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @!p bra w; }" :: "r"(bar) : "memory");
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;");
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" :: "l"(&map), "r"(0), "r"(0), "r"(dst) : "memory");
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%1, %2}], [%3];" :: "l"(&map), "r"(0), "r"(0), "r"(dst) : "memory");
    asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;");
  }
  out[threadIdx.x] = tile[threadIdx.x];
}
extern "C" __global__ void __launch_bounds__(384, 1) roles(float* out) {
  if (threadIdx.x < 128) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
  else asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  out[threadIdx.x] = exp2f(out[threadIdx.x]) * 1.5f + 2.f;
}
extern "C" __global__ void older(const float4* in, float4* out, unsigned* c) {
  __shared__ __align__(16) float4 s[128];
  uint32_t dst = (uint32_t)__cvta_generic_to_shared(&s[threadIdx.x]);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(dst), "l"(in + threadIdx.x));
  asm volatile("cp.async.commit_group; cp.async.wait_group 0;");
  __syncthreads();
  unsigned a0, a1, a2, a3; 
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(a0), "=r"(a1), "=r"(a2), "=r"(a3) : "r"(dst));
  float d0=0,d1=0,d2=0,d3=0;
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(a1), "r"(a3));
  out[threadIdx.x] = make_float4(d0,d1,d2,d3);
  c[threadIdx.x] = 1;
}
extern "C" __global__ void indexed(float* x, const int* order) {
  float v[8];  // indexed by what only the device knows: local memory, not registers
  for (int i = 0; i < 8; ++i) v[order[i]] = x[i];
  x[threadIdx.x] = v[threadIdx.x & 7];
}
