"""From a transformer's public configuration to the GEMMs and attentions that it runs.

Owns the rules of derivation. The configurations are data, in case files, under the names of the public ``config.json``.

Rules (M is the number of tokens in a step; a weight is stored as (N, K), so that every linear layer is a GEMM ``nt``)
    - A decode step has one token per sequence: M = batch. A prefill step has M = the prompt's tokens, of one sequence.
    - Tensor parallelism of degree t, as Megatron-LM splits it (Shoeybi et al., arXiv 1909.08053): qkv, gate_up and the
      LM head are column-parallel (N / t), o and down are row-parallel (K / t). A rank holds query heads / t, and key
      heads / t but at least one: beyond that, key heads are replicated.
    - qkv is one GEMM: N = (query heads + 2 key heads) x head_dim. gate_up is one GEMM: N = 2 x intermediate_size.
    - The LM head runs on the last token of every sequence: decode batches only.
    - A bias of a row-parallel layer is added after the all-reduce: it is part of the GEMM only where t = 1.
    - Attention: decode has one query per sequence and ``decode_context`` keys, prefill is causal over the prompt. In
      layers with a sliding window the cache of a decode step holds the window's keys only.
    - Experts are a grouped GEMM with one group for every expert that a token was routed to (the weights of the others
      are not read). Routing is drawn once per M, seeded: every token picks ``num_experts_per_tok`` different experts,
      all equally likely. Trained routers are less even: these are favourable loads. The experts' layers are split by
      tensor parallelism like any other; expert parallelism is not modelled. Expert biases are left out.
    - Multi-head latent attention (``kv_lora_rank`` is given): the down-projections of queries and keys are one
      replicated GEMM, q_b and kv_b are column-parallel, o is row-parallel; kv_b runs in prefill only (decode absorbs it
      into the attention). The attention itself is left out (its query and value dimensions differ), and so are routed
      experts; shared experts and dense layers are in.
Norms, rotary embeddings, activations, the router, attention sinks and all quantisation scales are not part of any case.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

import numpy as np

# (case id, derivation, tags); (operation, case id, formula)
Derived = tuple[str, str, tuple[str, ...]]
Operation = tuple[str, str, str]


class ModelError(Exception):
    """A configuration from which no shape can be derived; the message says which key, and what to write."""


@dataclass(frozen=True)
class Serving:
    """Under which conditions models run.

    Attributes:
        tensor_parallel: degrees of tensor parallelism.
        decode_batch: sequences of a decode step.
        prefill_tokens: tokens of a prefill step.
        decode_context: keys that a decoded token attends to.
        routing_seed: seed of the tokens' choice of experts.
    """

    tensor_parallel: tuple[int, ...] = (1, 4, 8)
    decode_batch: tuple[int, ...] = (1, 4, 16, 64, 256)
    prefill_tokens: tuple[int, ...] = (2048, 8192)
    decode_context: int = 8192
    routing_seed: int = 0

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Serving:
        """The [serving] table of a case file. Raises ModelError."""
        return cls(**_checked(cls, table, "[serving]"))


@dataclass(frozen=True)
class Model:
    """A model's configuration, under the names of its public ``config.json``.

    Attributes:
        name: short name, a tag of its cases.
        source: where the configuration was published, in words.
        hidden_size, num_attention_heads, num_key_value_heads, head_dim, intermediate_size, vocab_size: as published
            (``intermediate_size`` 0 where every layer is a mixture of experts).
        num_experts, num_experts_per_tok, moe_intermediate_size: of a mixture of experts; some configurations call the
            first ``num_local_experts`` and give the last as ``intermediate_size``.
        n_shared_experts: experts that every token goes through.
        sliding_window: keys that a query sees in layers with a window; 0 where there are none.
        attention_bias: whether qkv and o have biases.
        q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim: of multi-head latent attention.
        dtype: of weights and activations; the LM head is always bf16.
    """

    name: str
    source: str
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    head_dim: int = 0
    intermediate_size: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    n_shared_experts: int = 0
    sliding_window: int = 0
    attention_bias: bool = False
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    dtype: str = "bf16"

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Model:
        """A [[model]] table of a case file. Raises ModelError."""
        model = cls(**_checked(cls, table, "the model"))
        latent = ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        groups = {
            "num_experts": () if model.kv_lora_rank else ("num_experts_per_tok", "moe_intermediate_size"),
            "n_shared_experts": ("moe_intermediate_size",),
            "kv_lora_rank": latent,
        }
        needed = [n for name, names in groups.items() if getattr(model, name) for n in names]
        if not model.kv_lora_rank:
            needed.append("head_dim")
        if not model.num_experts:
            needed.append("intermediate_size")
        for name in needed:
            if not getattr(model, name):
                raise ModelError(f"{name} is missing: the model's shapes follow from it.")
        if model.num_experts_per_tok > model.num_experts:
            raise ModelError("num_experts_per_tok is larger than num_experts.")
        return model

    def cases(self, serving: Serving) -> Iterator[Derived]:
        """(case id, derivation in words, tags) of every operation under ``serving``.

        Tags: the model, the operation (qkv, o, gate_up, down, lm_head, experts, attention, ...), ``decode`` or
        ``prefill``, ``m<tokens>`` and ``tp<degree>``.
        """
        for tp in serving.tensor_parallel:
            for step, counts in (("decode", serving.decode_batch), ("prefill", serving.prefill_tokens)):
                for tokens in counts:
                    tags = (self.name, step, f"m{tokens}", f"tp{tp}")
                    about = f"{self.name}, {step} of {tokens} " + ("sequences" if step == "decode" else "tokens")
                    for operation, case_id, formula in self._operations(step, tokens, tp, serving):
                        yield case_id, f"{about}, TP {tp}: {operation}, {formula}", (operation, *tags)

    def _operations(self, step: str, tokens: int, tp: int, serving: Serving) -> Iterator[Operation]:
        """(operation, case id, formula) of one step on one rank."""
        hidden, q_heads = self.hidden_size, self._split("num_attention_heads", tp)
        kv_heads = self.num_key_value_heads
        if kv_heads % tp and tp % kv_heads:
            raise ModelError(f"num_key_value_heads {kv_heads} cannot be split over, or copied to, {tp} ranks.")
        kv_heads = max(1, kv_heads // tp)

        def linear(name: str, n: int, k: int, formula: str, *, bias: bool = False, dtype: str = "") -> Operation:
            options = ":bias" if bias else ""
            return name, f"gemm:{tokens}x{n}x{k}:{dtype or self.dtype}:nt{options}", formula

        if self.kv_lora_rank:
            q_rank, kv_rank = self.q_lora_rank, self.kv_lora_rank
            nope, rope, v = self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim
            down = q_rank + kv_rank + rope
            yield linear("qkv_a", down, hidden, f"N = {q_rank} + {kv_rank} + {rope} (replicated), K = {hidden}")
            formula = f"N = {q_heads} heads x ({nope} + {rope}), K = {q_rank}"
            yield linear("q_b", q_heads * (nope + rope), q_rank, formula)
            if step == "prefill":
                formula = f"N = {q_heads} heads x ({nope} + {v}), K = {kv_rank}"
                yield linear("kv_b", q_heads * (nope + v), kv_rank, formula)
            yield linear("o", hidden, q_heads * v, f"N = {hidden}, K = {q_heads} heads x {v}")
        else:
            d, bias = self.head_dim, self.attention_bias
            formula = f"N = ({q_heads} + 2 x {kv_heads}) heads x {d}, K = {hidden}"
            yield linear("qkv", (q_heads + 2 * kv_heads) * d, hidden, formula, bias=bias)
            yield from self._attention(step, tokens, q_heads, kv_heads, serving.decode_context)
            formula = f"N = {hidden}, K = {q_heads} heads x {d}"
            yield linear("o", hidden, q_heads * d, formula, bias=bias and tp == 1)
        if self.intermediate_size:
            width = self._split("intermediate_size", tp)
            yield linear("gate_up", 2 * width, hidden, f"N = 2 x {self.intermediate_size} / {tp}, K = {hidden}")
            yield linear("down", hidden, width, f"N = {hidden}, K = {self.intermediate_size} / {tp}")
        if self.n_shared_experts:
            full = self.n_shared_experts * self.moe_intermediate_size
            width = full // tp
            yield linear("shared_gate_up", 2 * width, hidden, f"N = 2 x {full} / {tp} (shared experts), K = {hidden}")
            yield linear("shared_down", hidden, width, f"N = {hidden}, K = {full} / {tp} (shared experts)")
        if self.num_experts and not self.kv_lora_rank:
            width = self._split("moe_intermediate_size", tp)
            groups = routed(tokens, self.num_experts, self.num_experts_per_tok, serving.routing_seed)
            m = "g" + "+".join(map(str, groups))
            share = (
                f"{tokens} x {self.num_experts_per_tok} tokens over {len(groups)} of {self.num_experts} experts "
                f"(uniform routing, seed {serving.routing_seed})"
            )
            for operation, n, k in (("experts_gate_up", 2 * width, hidden), ("experts_down", hidden, width)):
                yield operation, f"gemm:{m}x{n}x{k}:{self.dtype}:nt", f"{share}, N = {n}, K = {k}"
        if step == "decode":
            n = self._split("vocab_size", tp)
            yield linear("lm_head", n, hidden, f"N = {self.vocab_size} / {tp}, K = {hidden}", dtype="bf16")

    def _attention(self, step: str, tokens: int, q_heads: int, kv_heads: int, context: int) -> Iterator[Operation]:
        heads = f"h{q_heads}" + ("" if kv_heads == q_heads else f"kv{kv_heads}")
        gqa = f"{q_heads} query and {kv_heads} key heads of {self.head_dim}"
        for window in (0, self.sliding_window) if self.sliding_window else (0,):
            seen = f", layers with a window of {window}" if window else ""
            if step == "decode":
                keys = min(window or context, context)
                shape, options = f"b{tokens}{heads}q1k{keys}d{self.head_dim}", ""
                seen = f"one query over {keys} keys{seen}"
            else:
                shape = f"b1{heads}s{tokens}d{self.head_dim}"
                options = f":window={window}" if window and window < tokens else ":causal"
                seen = f"causal{seen}"
            yield "attention", f"attention:{shape}:bf16{options}", f"{gqa}, {seen}"

    def _split(self, name: str, tp: int) -> int:
        value: int = getattr(self, name)
        if value % tp:
            raise ModelError(f"{name} {value} cannot be split over {tp} ranks; leave {tp} out of tensor_parallel.")
        return value // tp


def routed(tokens: int, experts: int, per_token: int, seed: int) -> tuple[int, ...]:
    """Tokens of every expert that got any, in the experts' order.

    Every token picks ``per_token`` different experts, all equally likely. NumPy's RandomState draws them: its stream is
    frozen, so that the cases stay the same under every NumPy.
    """
    draws = np.random.RandomState(seed).random_sample((tokens, experts))
    chosen = np.argpartition(draws, per_token - 1, axis=1)[:, :per_token]
    counts = np.bincount(chosen.ravel(), minlength=experts)
    return tuple(int(c) for c in counts if c)


def _checked(cls: type, table: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The keys of ``table``, known and of the right types; lists become tuples."""
    known = {f.name: f for f in fields(cls)}
    for name in table:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}."
            raise ModelError(f"{what} has an unknown key {name!r}; {hint}")
    values: dict[str, Any] = {}
    for name, field in known.items():
        if name not in table:
            if field.default is MISSING:
                raise ModelError(f"{what} has no {name}.")
            continue
        value = table[name]
        if field.type == "str":
            right = isinstance(value, str) and bool(value)
        elif field.type == "bool":
            right = isinstance(value, bool)
        elif field.type == "int":
            right = _whole(value, 1 if field.default is MISSING else 0)
        else:
            right = isinstance(value, list) and all(_whole(v, 1) for v in value)
        if not right:
            wanted = {"str": "a string", "bool": "true or false", "int": "a whole number"}.get(
                str(field.type), "a list of whole numbers, such as [1, 4, 8]"
            )
            raise ModelError(f"{name} = {value!r}; write {wanted}.")
        values[name] = tuple(value) if isinstance(value, list) else value
    return values


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
