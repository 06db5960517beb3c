"""Derived shapes against shapes worked out by hand or published elsewhere."""

import numpy as np
import pytest

from benchmarks.engine import cases, models
from impls.workloads.base import parse_case

DENSE = {
    "name": "m",
    "source": "nowhere",
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 1000,
}


@pytest.fixture(scope="module")
def llm():
    """Every entry of the file, before entries of the same shape become one."""
    path = cases.FOLDER / "llm.toml"
    return list(cases._entries(path, *cases._document(path)))


def tagged(entries, *tags):
    return {entry.case.id for entry in entries if set(tags) <= entry.tags}


def expect(entries, tags, *ids):
    assert tagged(entries, *tags) == {parse_case(case_id).id for case_id in ids}


def test_llama_70b_decode_of_64_on_one_of_eight_gpus(llm):
    # 8 query heads and 1 key head of 128 a rank: (8 + 2) x 128 = 1280; 28672 / 8 = 3584; 128256 / 8 = 16032.
    expect(
        llm,
        ("llama-3.1-70b", "decode", "m64", "tp8"),
        "gemm:64x1280x8192:bf16:nt",
        "gemm:64x8192x1024:bf16:nt",
        "gemm:64x7168x8192:bf16:nt",
        "gemm:64x8192x3584:bf16:nt",
        "gemm:64x16032x8192:bf16:nt",
        "attention:b64h8kv1q1k8192d128:bf16",
    )


def test_llama_8b_prefill_on_one_gpu_has_no_lm_head(llm):
    expect(
        llm,
        ("llama-3.1-8b", "prefill", "m2048", "tp1"),
        "gemm:2048x6144x4096:bf16:nt",
        "gemm:2048x4096x4096:bf16:nt",
        "gemm:2048x28672x4096:bf16:nt",
        "gemm:2048x4096x14336:bf16:nt",
        "attention:b1h32kv8s2048d128:bf16:causal",
    )


def test_qwen3_32b_has_more_heads_than_its_hidden_size_holds(llm):
    # 64 heads of 128 = 8192 on a hidden size of 5120.
    assert "gemm:16x10240x5120:bf16:nt" in tagged(llm, "qwen3-32b", "qkv", "m16", "tp1")
    assert "gemm:16x5120x8192:bf16:nt" in tagged(llm, "qwen3-32b", "o", "m16", "tp1")


def test_key_heads_are_copied_where_there_are_fewer_than_ranks(llm):
    # Qwen3 30B-A3B: 32 query and 4 key heads over 8 ranks: 4 and 1.
    assert tagged(llm, "qwen3-30b-a3b", "attention", "m1", "tp8") == {"attention:b1h4kv1q1k8192d128:bf16"}
    assert tagged(llm, "qwen3-30b-a3b", "qkv", "m1", "tp8") == {"gemm:1x768x2048:bf16:nt"}


def test_deepseek_v3_s_dense_gemms_are_those_that_deepgemm_publishes(llm):
    # (N, K) in DeepGEMM's README (tensor parallelism 1), without its routed experts; then the dense layers and LM head.
    published = [(2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)]
    published += [(36864, 7168), (7168, 18432)]
    expect(
        llm,
        ("deepseek-v3", "prefill", "m8192", "tp1"),
        *(f"gemm:8192x{n}x{k}:f8e4m3:nt" for n, k in published),
    )
    decode = [f"gemm:1x{n}x{k}:f8e4m3:nt" for n, k in published if (n, k) != (32768, 512)]
    expect(llm, ("deepseek-v3", "decode", "m1", "tp1"), *decode, "gemm:1x129280x7168:bf16:nt")


def test_down_projections_of_latents_are_replicated(llm):
    for tp in (1, 4, 8):
        assert tagged(llm, "deepseek-v3", "qkv_a", "m16", f"tp{tp}") == {"gemm:16x2112x7168:f8e4m3:nt"}


def test_gpt_oss_has_biases_and_windows(llm):
    for size in ("20b", "120b"):
        at = (f"gpt-oss-{size}", "decode", "m4")
        # (64 + 2 x 8) heads of 64 = 5120; 64 x 64 = 4096. After an all-reduce the bias is no part of the GEMM.
        assert tagged(llm, *at, "qkv", "tp1") == {"gemm:4x5120x2880:bf16:nt:bias"}
        assert tagged(llm, *at, "o", "tp1") == {"gemm:4x2880x4096:bf16:nt:bias"}
        assert tagged(llm, *at, "o", "tp8") == {"gemm:4x2880x512:bf16:nt"}
        assert tagged(llm, *at, "attention", "tp1") == {
            "attention:b4h64kv8q1k8192d64:bf16",
            "attention:b4h64kv8q1k128d64:bf16",
        }
        expect(
            llm,
            (f"gpt-oss-{size}", "attention", "m2048", "tp1"),
            "attention:b1h64kv8s2048d64:bf16:causal",
            "attention:b1h64kv8s2048d64:bf16:window=128",
        )


def test_mixtral_s_experts_get_every_token_twice(llm):
    for tokens in (4, 8192):
        found = [e.case for e in llm if {"mixtral-8x7b", "experts_gate_up", f"m{tokens}", "tp4"} <= e.tags]
        (case,) = found
        assert (case.m, case.n, case.k) == (2 * tokens, 2 * 14336 // 4, 4096)
        assert len(case.groups) <= 8 and min(case.groups) >= 1
    (down,) = [e.case for e in llm if {"mixtral-8x7b", "experts_down", "m8192", "tp8"} <= e.tags]
    assert (down.n, down.k, len(down.groups)) == (4096, 1792, 8)


def test_one_token_reads_as_many_experts_as_it_is_routed_to(llm):
    (case,) = [e.case for e in llm if {"qwen3-30b-a3b", "experts_down", "m1", "tp1"} <= e.tags]
    assert case.groups == (1,) * 8


def test_both_layers_of_experts_share_their_routing(llm):
    of = {
        operation: next(e.case for e in llm if {"gpt-oss-120b", operation, "m64", "tp1"} <= e.tags).groups
        for operation in ("experts_gate_up", "experts_down")
    }
    assert of["experts_gate_up"] == of["experts_down"]


def test_every_model_has_every_step_and_its_derivation_in_words(llm):
    names = {
        "llama-3.1-8b", "llama-3.1-70b", "qwen3-8b", "qwen3-32b", "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3",
        "gpt-oss-20b", "gpt-oss-120b",
    }  # fmt: skip
    for name in names:
        for tp in (1, 4, 8):
            for tokens in (1, 4, 16, 64, 256, 2048, 8192):
                assert tagged(llm, name, f"m{tokens}", f"tp{tp}")
    entry = next(e for e in llm if {"llama-3.1-8b", "gate_up", "m64", "tp4"} <= e.tags)
    assert "llama-3.1-8b, decode of 64 sequences, TP 4: gate_up, N = 2 x 14336 / 4, K = 4096" in entry.why


def test_a_shape_that_models_share_is_measured_once_and_has_all_derivations():
    (entry,) = [e for e in cases.load("llm") if e.case.id == "gemm:1x6144x4096:bf16:nt"]
    assert {"llama-3.1-8b", "mixtral-8x7b", "qwen3-8b"} <= entry.tags
    assert entry.why.count("qkv") == 3
    # Qwen3 8B's gate_up over four GPUs has the shape of Llama's qkv on one; it is none of Llama's gate_up.
    assert {e.case.id for e in cases.load("llm:llama-3.1-8b+gate_up+tp4+m1")} == {"gemm:1x7168x4096:bf16:nt"}


def test_routing_is_deterministic_complete_and_even_on_average():
    assert models.routed(64, 128, 8, 0) == models.routed(64, 128, 8, 0)
    assert models.routed(64, 128, 8, 0) != models.routed(64, 128, 8, 1)
    for tokens, experts, per_token in ((1, 8, 8), (3, 8, 2), (4096, 32, 4)):
        counts = np.array(models.routed(tokens, experts, per_token, 0))
        assert counts.sum() == tokens * per_token
        assert counts.min() >= 1 and counts.max() <= tokens
    # 4096 tokens, 4 of 32: binomial(4096, 1/8): mean 512, standard deviation 21.
    assert abs(counts - 512).max() < 5 * 21.2


def test_routing_stays_the_same_under_every_numpy():
    # RandomState's stream is frozen; these values were drawn once.
    assert models.routed(4, 8, 2, 0) == (2, 1, 1, 3, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hiden_size": 1}, r"unknown key 'hiden_size'; did you mean hidden_size\?"),
        ({"hidden_size": "4096"}, r"hidden_size = '4096'; write a whole number"),
        ({"num_key_value_heads": 0}, r"num_key_value_heads = 0; write a whole number"),
        ({"hidden_size": -1}, r"hidden_size = -1"),
        ({"attention_bias": 1}, r"attention_bias = 1; write true or false"),
        ({"head_dim": 0}, r"head_dim is missing"),
        ({"intermediate_size": 0}, r"intermediate_size is missing"),
        ({"num_experts": 4}, r"num_experts_per_tok is missing"),
        ({"num_experts": 4, "num_experts_per_tok": 5, "moe_intermediate_size": 8}, r"larger than num_experts"),
        ({"kv_lora_rank": 4}, r"q_lora_rank is missing"),
        ({"n_shared_experts": 1}, r"moe_intermediate_size is missing"),
    ],
)
def test_configurations_without_shapes_are_refused(change, message):
    with pytest.raises(models.ModelError, match=message):
        models.Model.of(DENSE | change)


def test_what_tensor_parallelism_cannot_split_is_refused():
    model = models.Model.of(DENSE | {"num_attention_heads": 6})
    with pytest.raises(models.ModelError, match="num_attention_heads 6 cannot be split over 4 ranks"):
        list(model.cases(models.Serving()))
    model = models.Model.of(DENSE | {"num_key_value_heads": 3})
    with pytest.raises(models.ModelError, match="num_key_value_heads 3 cannot be split over, or copied to, 4 ranks"):
        list(model.cases(models.Serving()))


def test_serving_conditions_can_be_changed_and_are_checked():
    serving = models.Serving.of({"tensor_parallel": [2], "decode_batch": [3], "prefill_tokens": []})
    derived = list(models.Model.of(DENSE).cases(serving))
    assert {tags[1:] for _, _, tags in derived} == {("m", "decode", "m3", "tp2")}
    with pytest.raises(models.ModelError, match=r"decode_batch = 4; write a list of whole numbers"):
        models.Serving.of({"decode_batch": 4})
