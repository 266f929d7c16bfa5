"""Measures whole models of Hugging Face's, as they are and with ``use_moe`` on all their blocks.

``python -m benchmarks.models [--model NAME ...] [--case NAME ...] [--json FILE]`` needs a CUDA GPU
and transformers 5.17 or later. ``--device cpu --tiny`` runs the same with a toy, whose times say
nothing. A file that is there keeps the cases that a run leaves out.

A model has a few layers of the real one's shape, random weights in bfloat16, made where it runs,
and attention by SDPA. The peers are transformers' own ways of running experts, ``eager``,
``grouped_mm`` (its default) and for few tokens ``batched_mm``; a ratio is the time of the best of
them over that of ``use_moe``. All ways have the same weights and take turns.

``prefill``   4096 tokens, to the last one's logits
``decode``    32 steps of 64 sequences after 128 tokens, with a DynamicCache as ``generate`` has
``token``     the same for one sequence
``training``  forward, loss and backward of 4 x 1024 tokens
``compiled``  the prefill under ``torch.compile``, beside ``grouped_mm`` compiled

Before a case is timed, all ways' logits are compared, in training gradients too. They may not
differ by more than bfloat16 rounds, of the largest one. Logits of experts that are equal once
rounded may be chosen in any order, and then a token goes elsewhere: so all ways get the choices of
``eager`` for that, and the weights that cuda_ops gives for the same tokens are compared by
themselves. A compiled model cannot be told what to choose; there, half of the tokens must agree.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.model_checks import REFERENCE, compared, compared_compiled
from cuda_ops.benchmarking.clock import rotated, undisturbed
from cuda_ops.benchmarking.stats import Interval, median_interval, ratio_interval
from cuda_ops.errors import BenchmarkError
from cuda_ops.integrations import convert
from cuda_ops.ops.moe import MODELS as SHAPES

OURS = "use_moe"
_WARM_UP = 2


@dataclass(frozen=True)
class Model:
    """A model's class, without its ending, and what its config says beside the experts."""

    prefix: str
    config: Mapping[str, Any]
    experts: str = "num_experts"
    inner: str = "moe_intermediate_size"


#: By the names of :data:`cuda_ops.ops.moe.MODELS`, which has the sizes of the experts.
MODELS = {
    "Qwen3-30B-A3B": Model("Qwen3Moe", {
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "norm_topk_prob": True,
    }),
    "OLMoE": Model("Olmoe", {
        "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 50304,
        "norm_topk_prob": False,
    }, inner="intermediate_size"),
    "Mixtral 8x7B": Model("Mixtral", {
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
    }, "num_local_experts", "intermediate_size"),
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """How much of each case there is."""

    layers: int = 4
    prefill: int = 4096
    sequences: int = 64
    prompt: int = 128
    steps: int = 32
    batch: tuple[int, int] = (4, 1024)
    #: Tokens at the end of a prefill whose logits are compared.
    compared: int = 256
    rounds: int = 15
    backend: str = "inductor"


#: A toy for a machine without a GPU, compiled without a compiler.
TINY = Sizes(2, 24, 3, 8, 3, (2, 8), 24, 6, "aot_eager")
_TINY_CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
                "vocab_size": 96}  # fmt: skip


def made(name: str, sizes: Sizes, device: torch.device) -> Any:
    """Makes a model on a device, with random weights."""
    import transformers

    known, tiny = MODELS[name], sizes is TINY
    hidden, inner, experts, top_k = (64, 32, 8, 2) if tiny else SHAPES[name]
    config = getattr(transformers, f"{known.prefix}Config")(**{
        **known.config, **(_TINY_CONFIG if tiny else {}), known.experts: experts,
        known.inner: inner, "hidden_size": hidden, "num_experts_per_tok": top_k,
        "num_hidden_layers": sizes.layers, "tie_word_embeddings": False, "pad_token_id": None,
        "bos_token_id": None, "eos_token_id": None,
    })  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, f"{known.prefix}ForCausalLM")._from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # norms are ones
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def ways(model: Any, implementations: Sequence[str]) -> dict[str, Any]:
    """Returns copies of a model that share its weights: one for each of transformers' ways to run
    experts, and one with cuda_ops.
    """
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copies = {name: copy.deepcopy(model, dict(tensors)) for name in (*implementations, OURS)}
    for name in implementations:
        copies[name].set_experts_implementation(name)
    conversion = convert(copies[OURS])
    if conversion.left or len(conversion.replaced) != model.config.num_hidden_layers:
        raise RuntimeError(f"use_moe did not change all blocks:\n{conversion}")
    return copies


# --- cases --------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """What is timed: ``run`` of what ``prepare`` returned. With ``keep`` it returns the logits of
    that many of the last tokens, or of all steps, and else what costs least.
    """

    run: Callable[[Any, int], Any]
    prepare: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Case:
    text: Callable[[Sizes], str]
    make: Callable[[Any, Sizes, torch.device], Call]
    peers: tuple[str, ...] = (REFERENCE, "grouped_mm")
    #: Steps of a call, by which its time is divided.
    steps: Callable[[Sizes], int] = lambda sizes: 1
    training: bool = False
    compiled: bool = False


def _ids(model: Any, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(1)
    return torch.randint(model.config.vocab_size, shape, device=device, generator=generator)


def _prefill(model: Any, sizes: Sizes, device: torch.device) -> Call:
    ids = _ids(model, (1, sizes.prefill), device)

    def run(_: Any, keep: int) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(
                input_ids=ids, use_cache=False, logits_to_keep=keep or 1
            ).logits
        return logits

    return Call(run)


def _compiled(model: Any, sizes: Sizes, device: torch.device) -> Call:
    return _prefill(torch.compile(model, dynamic=False, backend=sizes.backend), sizes, device)


def _decode(sequences: Callable[[Sizes], int], model: Any, sizes: Sizes, device: Any) -> Call:
    import transformers

    ids = _ids(model, (sequences(sizes), sizes.prompt + sizes.steps), device)
    # Renamed between 5.17 and 5.24.
    known = inspect.signature(type(model).forward).parameters
    name = "cache" if "cache" in known else "past_key_values"

    def prepare() -> Any:
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad(), _prompts_in_groups(model):
            model(input_ids=ids[:, : sizes.prompt], logits_to_keep=1, **{name: cache})
        return cache

    def run(cache: Any, keep: int) -> Any:
        found = []
        with torch.no_grad():
            for k in range(sizes.prompt, sizes.prompt + sizes.steps):
                # The same tokens each way; what was picked would be the next ones.
                logits = model(input_ids=ids[:, k : k + 1], **{name: cache}).logits
                found.append(logits if keep else logits[:, -1].argmax(-1))
        return torch.cat(found, 1) if keep else found

    return Call(run, prepare)


@contextlib.contextmanager
def _prompts_in_groups(model: Any) -> Iterator[None]:
    """Has a model that would copy the matrices of each token's experts, 384 GiB of them for the
    prompts of 64 sequences, run them as ``grouped_mm`` does; no prompt is timed.
    """
    way = getattr(model.config, "_experts_implementation", None)
    if way != "batched_mm":
        yield
        return
    model.set_experts_implementation("grouped_mm")
    try:
        yield
    finally:
        model.set_experts_implementation(way)


def _training(model: Any, sizes: Sizes, device: torch.device) -> Call:
    ids = _ids(model, sizes.batch, device)

    def prepare() -> None:
        model.zero_grad(set_to_none=True)

    def run(_: Any, keep: int) -> torch.Tensor:
        out = model(input_ids=ids, labels=ids, use_cache=False)
        out.loss.backward()
        found: torch.Tensor = out.logits if keep else out.loss
        return found.detach()

    return Call(run, prepare)


_FEW = (REFERENCE, "grouped_mm", "batched_mm")
CASES = {
    "prefill": Case(lambda sizes: f"prefill, {sizes.prefill} tokens", _prefill),
    "decode": Case(
        lambda sizes: f"decoding, a step of {sizes.sequences} sequences",
        partial(_decode, lambda sizes: sizes.sequences), _FEW, lambda sizes: sizes.steps,
    ),
    "token": Case(
        lambda sizes: "decoding, a token of one sequence",
        partial(_decode, lambda sizes: 1), _FEW, lambda sizes: sizes.steps,
    ),
    "training": Case(
        lambda sizes: f"training step, {sizes.batch[0]} x {sizes.batch[1]} tokens", _training,
        training=True,
    ),
    "compiled": Case(
        lambda sizes: f"compiled prefill, {sizes.prefill} tokens", _compiled, ("grouped_mm",),
        compiled=True,
    ),
}  # fmt: skip


# --- timing -------------------------------------------------------------------


def measure(calls: Mapping[str, Call], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Returns seconds of wall time, of each way in turns, from an idle device to an idle device."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    with undisturbed():
        for turn in range(rounds + _WARM_UP):
            gc.collect()
            for name in rotated([*calls], turn):
                state = calls[name].prepare()
                _wait(device)
                start = perf_counter()
                out = calls[name].run(state, 0)
                _wait(device)
                elapsed = perf_counter() - start
                del out, state
                if turn >= _WARM_UP:
                    found[name].append(elapsed)
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run_case(model: Any, name: str, sizes: Sizes, device: torch.device) -> list[dict[str, Any]]:
    """Compares and measures one case; returns a row a way."""
    case = CASES[name]
    models = ways(model, [*dict.fromkeys((REFERENCE, *case.peers))])
    for one in models.values():
        one.train(case.training)
    calls = {way: case.make(one, sizes, device) for way, one in models.items()}
    if case.compiled:  # the reference is not compiled: its loop over experts has no one graph
        calls[REFERENCE] = _prefill(models[REFERENCE], sizes, device)
    logits = {way: partial(_logits, call, sizes.compared) for way, call in calls.items()}
    found = compared_compiled(logits, OURS) if case.compiled else compared(models, logits, OURS)
    timed = {way: call for way, call in calls.items() if way in (*case.peers, OURS)}
    seconds = measure(timed, device, sizes.rounds)
    medians = {way: median_interval(seconds[way]) for way in timed}
    best = min(case.peers, key=lambda way: medians[way].value)
    return [
        {
            "case": name,
            "what": case.text(sizes),
            "way": way,
            "milliseconds": medians[way].scaled(1e3 / case.steps(sizes)),
            "best_peer": best,
            "best_over": ratio_interval(seconds[best], seconds[way]),
            "difference": found.difference.get(way, 0.0),
            "gradient_difference": found.gradient.get(way),
            **({k: v for k, v in asdict(found).items() if k in _OF_OURS} if way == OURS else {}),
        }
        for way in timed
    ]


def _logits(call: Call, keep: int) -> torch.Tensor:
    found: torch.Tensor = call.run(call.prepare(), keep)
    return found


_OF_OURS = ("own_routing", "weights", "elsewhere")


# --- the command --------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--model", nargs="+", choices=MODELS, metavar="NAME",
                        default=["Qwen3-30B-A3B"], help=", ".join(MODELS))  # fmt: skip
    parser.add_argument("--case", nargs="+", choices=CASES, metavar="NAME", default=[*CASES],
                        help=", ".join(CASES))  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a toy that any machine can run")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    if missing := _missing(options):
        print(f"benchmarks.models: {missing}", file=sys.stderr)
        return 2
    import transformers

    device, sizes = torch.device(options.device), TINY if options.tiny else Sizes()
    try:
        found = report.earlier(options.json)
    except BenchmarkError as error:
        print(f"benchmarks.models: {error}", file=sys.stderr)
        return 2
    console, known = Console(), report.environment(device)
    known["transformers"] = transformers.__version__
    console.print(known)
    rows: list[dict[str, Any]] = []
    failures = 0
    for name in options.model:
        model = made(name, sizes, device)
        for case in options.case:
            try:
                measured = run_case(model, case, sizes, device)
            except RuntimeError as error:  # such as no memory: it loses no other case
                print(f"benchmarks.models: {name}: {case}: {error}", file=sys.stderr)
                own, failed = [], [{"model": name, "case": case, "error": str(error)}]
            else:
                own = [{"model": name, "layers": sizes.layers, **row} for row in measured]
                failed = []
            _put(found, name, case, known, cases=own, failed=failed)
            report.save(options.json, found)
            rows += own
            failures += len(failed)
            model.zero_grad(set_to_none=True)
            torch.compiler.reset()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        del model
    console.print(_table(rows))
    return 1 if failures else 0


def _missing(options: argparse.Namespace) -> str:
    """Says what this machine lacks."""
    if options.device == "cuda" and not torch.cuda.is_available():
        return "needs a CUDA GPU, and torch sees none; --device cpu --tiny runs a toy"
    if options.device == "cpu" and not options.tiny:
        return "runs on a CPU with --tiny only"
    try:
        import transformers
    except ImportError:
        return "needs transformers 5.17 or later: pip install transformers"
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 17):
        return f"needs transformers 5.17 or later, got {transformers.__version__}"
    return ""


def _put(
    found: dict[str, Any], name: str, case: str, known: Mapping[str, str],
    **rows: Sequence[Mapping[str, Any]],
) -> None:  # fmt: skip
    """Puts one case, with its environment, in the place of what an earlier run found of it."""
    for key, new in rows.items():
        kept = [r for r in found.get(key, ()) if (r["model"], r["case"]) != (name, case)]
        plain = (
            {k: asdict(v) if isinstance(v, Interval) else v for k, v in r.items()} for r in new
        )
        found[key] = [*kept, *plain]
    found["environments"][f"{name}, {case}"] = known


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("model", "case", "way", "ms", "best of transformers over it", "difference",
                  title="whole models, bfloat16")  # fmt: skip
    for row in rows:
        text = {k: f"{row[k].value:.3g} ({row[k].low:.3g} to {row[k].high:.3g})"
                for k in ("milliseconds", "best_over")}  # fmt: skip
        if row["way"] == row["best_peer"]:
            text["best_over"] = "the best"
        table.add_row(row["model"], row["what"], row["way"], *text.values(),
                      f"{row['difference']:.2g}")  # fmt: skip
    return table


if __name__ == "__main__":
    sys.exit(main())
