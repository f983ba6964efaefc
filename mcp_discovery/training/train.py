"""Trains the discovery adapter: one LoRA that scores (tool, request) pairs and gives both their vectors.

A step merges the adapter into the frozen base, runs one batch and descends on

    score loss        cross-entropy of each right tool against the wrong ones of its group, on the
                      difference of the logits of yes and no
    + probability     binary cross-entropy of the evidence that serving publishes (that difference plus
      weight x        10 x cosine, less 5), over the right tools and those that certainly do not serve
    + match weight x  cross-entropy of each request's vector against the vectors of all tools in the
                      batch, cosine over 0.03

Everything a step draws is a function of the seed and the step's number, so that a run resumed from a
checkpoint goes on as if it had not stopped. On the way it keeps snapshots; `snapshots` says which of them,
or which mean of them, becomes the adapter.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from engine.errors import ModelError
from engine.tokenizer import Tokenizer
from engine.weights import Weights, load_weights, read_adapter
from mcp_discovery.discovery.calibration import COSINE_WEIGHT, Calibration
from mcp_discovery.discovery.prompts import VERSION, Prompts
from mcp_discovery.model_store import digest
from mcp_discovery.training.batches import Batch, BatchSize, StepBatches
from mcp_discovery.training.corpus import Corpus
from mcp_discovery.training.data import DataError, find_sets, load_idle, load_set
from mcp_discovery.training.evaluate import Case, table
from mcp_discovery.training.forward import Decoder
from mcp_discovery.training.groups import GroupSampler, Mixture
from mcp_discovery.training.infer import Reader
from mcp_discovery.training.lora import Base, LoRA, adapter_bytes, kept_rows
from mcp_discovery.training.losses import matching_loss, probability_loss, ranking_loss
from mcp_discovery.training.mining import mine
from mcp_discovery.training.options import DEFAULT_FACTORS, TrainOptions
from mcp_discovery.training.snapshots import State, Verdict, held_out, judge, with_averages

MOST_ADAPTER_BYTES = 15_000_000


@dataclass(frozen=True, slots=True)
class TrainReport:
    adapter: Path
    sha256: str
    chosen: str  # the snapshot, or the range of the snapshots whose mean it is
    steps: int
    seconds: float
    tokens: int
    history: tuple[dict[str, float], ...]  # one entry a logged step
    held_out: Mapping[str, Verdict]  # snapshot or range -> on held-out catalogues
    dev: Mapping[str, Verdict]  # of the adapters written


def run_training(folders: Sequence[Path], out: Path, options: TrainOptions) -> TrainReport:
    """Trains on the sets in `folders` and writes the adapter to `out`, a report and a log beside it.

    Raises DataError where a set or an option is unusable, ModelError where the base is.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_suffix(".log").open("a", encoding="utf-8") as log:
        return _Run(folders, out, options, log).go()


def pick_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _compute_copy(weights: Weights, dtype: torch.dtype) -> Weights:
    """The same weights in `dtype`; the matrices that the adapter changes stay as they are, unused."""

    def cast(norm: Tensor | None) -> Tensor | None:
        return None if norm is None else norm.to(dtype)

    layers = tuple(
        replace(
            layer,
            attention_norm=layer.attention_norm.to(dtype),
            mlp_norm=layer.mlp_norm.to(dtype),
            q_norm=cast(layer.q_norm),
            k_norm=cast(layer.k_norm),
        )
        for layer in weights.layers
    )
    embedding = weights.embedding.to(dtype)
    head = embedding if weights.head is weights.embedding else weights.head.to(dtype)
    return Weights(embedding, layers, weights.final_norm.to(dtype), head)


class _Run:
    """One training run, from reading the sets to the last figures."""

    def __init__(self, folders: Sequence[Path], out: Path, options: TrainOptions, log: TextIO) -> None:
        self._began = time.monotonic()
        self._out, self._options, self._log = out, options, log
        torch.manual_seed(options.seed)
        self._device = pick_device(options.device)
        self._read_sets(folders)
        self._prompts = Prompts(_tokenizer(options.model))
        self._prefix = cache(self._prompts.prefix)
        self._batches = self._step_batches()
        self._say(
            f"{len(self._corpus.tools)} tools, {self._corpus.example_count} examples; a step is "
            f"{self._batches.layout.tokens} tokens in {len(self._batches.layout.blocks)} lengths"
        )
        self._load_model()
        self._step = 0
        self._tokens = 0
        self._history: list[dict[str, float]] = []
        self._kept: dict[str, State] = {}
        self._pending: Tensor = torch.zeros(6, device=self._device)
        self._spent = 0.0  # seconds of training before this process
        self._first_step = 0

    def _read_sets(self, folders: Sequence[Path]) -> None:
        options = self._options
        sets = [load_set(folder) for folder in find_sets(folders)]
        if unknown := set(options.hold_out).difference(each.name for each in sets):
            raise DataError(f"hold_out names {min(unknown)}, which is none of the sets")
        idle = load_idle(options.idle) if options.idle else []
        kept, self._held = held_out(sets, options.hold_out, options.seed, options.held_queries)
        self._corpus = Corpus(kept, options.factors)
        self._dev: list[tuple[Case, Case]] = []  # with every request, and with a quarter of them
        for folder in find_sets(options.dev):
            each = load_set(folder)
            nothing = [text for text, names in idle if each.name in names]
            if each.queries:
                most = options.dev_queries
                self._dev.append((Case(each, most, nothing), Case(each, max(most // 4, 1), nothing)))

    def _step_batches(self) -> StepBatches:
        options = self._options
        sampler = GroupSampler(self._corpus, options.mixture)
        return StepBatches(self._corpus, sampler, self._prompts, options.size, options.seed)

    def _load_model(self) -> None:
        options, device = self._options, self._device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        shape, weights = load_weights(options.model, torch.float32, device)
        if adapter_bytes(shape, options.rank) > MOST_ADAPTER_BYTES:
            raise DataError(
                f"an adapter of rank {options.rank} is larger than {MOST_ADAPTER_BYTES:,} bytes: lower it"
            )
        self._base = Base(weights, dtype)
        longest = self._batches.layout.blocks[-1].length
        self._decoder = Decoder(shape, _compute_copy(weights, dtype), longest, compiled=options.compiled)
        head = weights.head
        self._direction = head[self._prompts.positive] - head[self._prompts.negative]
        self._base_sha256 = digest(options.model)
        if options.start is None:
            self._adapter = LoRA.create(weights, options.rank, options.alpha, options.seed)
        else:
            stored = read_adapter(options.start, self._base_sha256)
            self._adapter = LoRA.stored(stored, shape.layers, device)
        self._optimizer = torch.optim.AdamW(
            self._adapter.parameters(),
            lr=options.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=options.weight_decay,
            fused=device.type == "cuda",
        )
        self._say(f"base loaded on {device} in {self._since():.0f} s")

    def _since(self) -> float:
        return time.monotonic() - self._began

    def _say(self, text: str) -> None:
        print(text, flush=True)
        print(text, file=self._log, flush=True)

    # The course of a run

    def go(self) -> TrainReport:
        self._resume()
        self._trained_from = saved = self._since()
        self._positions = self._batches.layout.positions().to(self._device)
        steps = self._options.steps
        mined = {round(at * steps) for at in self._options.mine_at}
        kept = {round(at * steps): f"{at:.0%}" for at in (*self._options.keep_at, 1.0)}
        while self._step < steps:
            for batch in self._loader():
                self._train(batch)
                if self._step % self._options.log_every == 0:
                    self._report_progress()
                if self._step in kept:
                    self._kept[kept[self._step]] = self._adapter.copied()
                if self._since() - saved > self._options.save_every_s:
                    self._save()
                    saved = self._since()
                if self._step in mined:
                    self._mine()
                    break  # the loader's workers hold the old wrong answers
        self._report_progress()
        self._save()
        return self._finish()

    def _loader(self) -> Iterator[Batch]:
        """Batches from the current step on."""
        workers = self._options.workers
        return iter(
            DataLoader(
                self._batches,
                batch_size=None,
                sampler=range(self._step, self._options.steps),
                num_workers=workers,
                prefetch_factor=4 if workers else None,
                pin_memory=self._device.type == "cuda",
            )
        )

    def _train(self, batch: Batch) -> None:
        options = self._options
        batch = Batch(*(tensor.to(self._device, non_blocking=True) for tensor in batch))
        for group in self._optimizer.param_groups:
            progress = self._step / options.steps
            group["lr"] = options.learning_rate * schedule(progress, options.warmup, options.last_rate)
        score, probability, match = self._losses(batch)
        total = score + options.probability_weight * probability + options.match_weight * match
        torch.autograd.backward(total)
        norm = torch.nn.utils.clip_grad_norm_(self._adapter.parameters(), options.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._pending += torch.stack(
            [total.detach(), score.detach(), probability.detach(), match.detach(), norm, batch.filled.float()]
        )
        if self._step == self._first_step:
            self._pending.tolist()  # waits for the first step, which compiles: the clock starts after it
            self._say(f"first step after {self._since():.0f} s")
            self._trained_from = self._since()
        self._step += 1

    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        options = self._options
        kept = None
        if options.rank_dropout:
            kept = kept_rows(self._adapter, options.rank_dropout, f"{options.seed}/{self._step}")
        rows = torch.cat((batch.answers.flatten(), batch.tools, batch.requests))
        states = self._decoder.hidden_states(
            batch.tokens, self._positions, self._batches.layout, self._base.merged(self._adapter, kept), rows
        ).float()
        parts = [batch.answers.numel(), batch.tools.numel(), batch.requests.numel()]
        answers, tools, requests = torch.split(states, parts)
        logits = (answers @ self._direction).view_as(batch.score_right)
        tools, requests = functional.normalize(tools, dim=1), functional.normalize(requests, dim=1)
        groups, size = batch.score_right.shape
        own = tools[: groups * size].view(groups, size, -1)
        cosines = torch.einsum("gcd,gd->gc", own, requests[:groups])
        evidence = logits + COSINE_WEIGHT * (cosines - 0.5)
        return (
            ranking_loss(logits, batch.score_right, batch.score_wrong),
            probability_loss(evidence, batch.score_right, batch.score_sure, options.smoothing),
            matching_loss(requests, tools, batch.match_right, batch.match_wrong, options.temperature),
        )

    def _report_progress(self) -> None:
        """The one place that waits for the device while training."""
        count = self._step - int(self._history[-1]["step"] if self._history else self._first_step)
        if count <= 0:
            return
        total, score, probability, match, norm, filled = (self._pending / count).tolist()
        self._pending.zero_()
        self._tokens += round(filled * count)
        elapsed = self._since()
        last = self._history[-1]["seconds"] if self._history else self._trained_from
        pace = max(elapsed - last, 1e-9) / count
        left = pace * (self._options.steps - self._step)
        self._history.append(
            {
                "step": self._step,
                "seconds": elapsed,
                "loss": total,
                "score": score,
                "probability": probability,
                "match": match,
                "norm": norm,
            }
        )
        self._say(
            f"step {self._step} of {self._options.steps} loss {total:.3f} score {score:.3f} "
            f"prob {probability:.3f} match {match:.3f} norm {norm:.2f} "
            f"{pace * 1e3:.0f} ms {filled / pace:,.0f} tokens/s eta {left:.0f} s"
        )

    def _reader(self, state: State | None = None) -> Reader:
        """Of the adapter as it is, or as it was."""
        adapter = self._adapter if state is None else self._adapter.replaced(state)
        with torch.no_grad():
            matrices = self._base.merged(adapter)
        return Reader(self._decoder, matrices, self._prompts, self._prefix)

    def _mine(self) -> None:
        began = time.monotonic()
        found = mine(self._corpus, self._reader(), self._options.seed + self._step)
        self._say(f"mined {found:,} wrong answers in {time.monotonic() - began:.1f} s")

    # What a run leaves

    def _resume(self) -> None:
        path = self._options.checkpoint
        if path is not None and path.is_file():
            state = torch.load(path, map_location=self._device, weights_only=True)
            if state["steps"] != self._options.steps:
                raise DataError(f"{path} is of a run of {state['steps']} steps: go on with as many")
            self._adapter.restore(state["adapter"])
            self._optimizer.load_state_dict(state["optimizer"])
            self._corpus.restore_found(state["found"])
            self._kept = state["kept"]
            self._step = state["step"]
            self._spent = state["seconds"]
            self._say(f"resumed at step {self._step}")
        self._first_step = self._step

    def _save(self) -> None:
        """The checkpoint, where one is wanted."""
        path = self._options.checkpoint
        if path is None:
            return
        state = {
            "adapter": self._adapter.state(),
            "optimizer": self._optimizer.state_dict(),
            "found": self._corpus.found_state(),
            "kept": self._kept,
            "step": self._step,
            "steps": self._options.steps,
            "seconds": self._spent + self._since() - self._trained_from,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        torch.save(state, part)
        part.replace(path)

    def _finish(self) -> TrainReport:
        """Chooses, writes the chosen adapter and the next best ones, and says how they do."""
        states, verdicts, written = self._chosen()
        for place, name in enumerate(written):
            self._write(self._path(place, name), name, states[name])
        self._write_calibration(verdicts.get(written[0]))
        dev: dict[str, Verdict] = {}
        if self._dev:
            for place, name in enumerate(written):
                dev[name] = judge(self._reader(states[name]), [each[min(place, 1)] for each in self._dev])
                self._say(f"{name} on the dev sets\n{table(dev[name].figures)}\n{dev[name].abstention or ''}")
        report = TrainReport(
            self._out,
            digest(self._out),
            written[0],
            self._step,
            self._spent + self._since(),
            self._tokens,
            tuple(self._history),
            verdicts,
            dev,
        )
        whole = {**asdict(report), "options": asdict(self._options)}
        self._out.with_suffix(".report.json").write_text(json.dumps(whole, indent=1, default=str) + "\n")
        self._say(
            f"{self._step} steps, {self._tokens:,} tokens in {report.seconds:.0f} s; "
            f"wrote {', '.join(str(self._path(*each)) for each in enumerate(written))}"
        )
        return report

    def _chosen(self) -> tuple[dict[str, State], dict[str, Verdict], list[str]]:
        """What there is to choose from, how it did on held-out catalogues, and the names to write."""
        states = with_averages(self._kept)
        if not self._held:
            name = self._options.choose or "100%"
            if name not in states:
                raise DataError(f"there is no snapshot {name!r} to choose; there are {', '.join(states)}")
            return states, {}, [name]
        verdicts = {name: self._judged(name, state) for name, state in states.items()}
        order = sorted(verdicts, key=lambda name: -verdicts[name].merit)
        return states, verdicts, order[: 1 + self._options.also_written]

    def _path(self, place: int, name: str) -> Path:
        if place == 0:
            return self._out
        return self._out.with_name(f"{self._out.stem}.{name.replace('%', '')}{self._out.suffix}")

    def _write(self, path: Path, name: str, state: State) -> None:
        metadata = {
            "base_sha256": self._base_sha256,
            "base": self._options.model.name,
            "prompt_version": VERSION,
            "steps": str(self._step),
            "snapshot": name,
            "seed": str(self._options.seed),
        }
        self._adapter.replaced(state).save(path, metadata)

    def _write_calibration(self, verdict: Verdict | None) -> None:
        """Beside the adapter: the scale that it was trained to, and the bound of doubt on held-out sets."""
        scale = Calibration(slope=1.0, offset=-COSINE_WEIGHT / 2)
        if verdict is not None and verdict.abstention is not None:
            found = verdict.abstention
            scale = replace(scale, doubt_weight=found.weight, doubt_below=round(found.bound, 3))
        whole = {"adapter_sha256": digest(self._out), "calibration": asdict(scale)}
        self._out.with_suffix(".json").write_text(json.dumps(whole, indent=2) + "\n")

    def _judged(self, name: str, state: State) -> Verdict:
        began = time.monotonic()
        verdict = judge(self._reader(state), self._held)
        means = " ".join(
            f"{case} {each['scored+cos']['ndcg10']:.3f}/{each['scored+cos']['hit1']:.3f}"
            for case, each in verdict.figures.items()
        )
        took = time.monotonic() - began
        doubt = f"; {verdict.abstention}" if verdict.abstention else ""
        self._say(f"{name}: merit {verdict.merit:.4f}, held out {means}{doubt} ({took:.1f} s)")
        return verdict


def schedule(progress: float, warmup: float, last: float) -> float:
    """Share of the learning rate: a linear rise over `warmup`, then half a cosine down to `last`."""
    if progress < warmup:
        return max(progress / warmup, 0.01)
    turned = min((progress - warmup) / (1 - warmup), 1.0)
    return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * turned))


def _tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_folder(model) if model.is_dir() else Tokenizer.from_gguf(model)


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m mcp_discovery.training.train`: every option of a run on the command line."""
    parser = argparse.ArgumentParser(
        prog="mcp_discovery.training.train", description="Train the discovery adapter."
    )
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="tool sets, or folders of them")
    parser.add_argument(
        "--dev", type=Path, nargs="*", default=[], help="sets to evaluate on, or folders of them"
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="GGUF file or safetensors folder of the base"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="adapter to write; report and log go beside it"
    )
    parser.add_argument(
        "--checkpoint", type=Path, help="resumed from where it exists, and written while training"
    )
    parser.add_argument("--choose", help="snapshot or range to write where nothing is held out")
    parser.add_argument("--idle", type=Path, help="requests that nothing serves, for --dev")
    for name in (
        "steps",
        "rank",
        "seed",
        "workers",
        "held_queries",
        "dev_queries",
        "also_written",
        "log_every",
    ):
        parser.add_argument(_flag(name), type=int, default=_default(name))
    for name in (
        "alpha",
        "learning_rate",
        "weight_decay",
        "rank_dropout",
        "smoothing",
        "match_weight",
        "probability_weight",
        "temperature",
    ):
        parser.add_argument(_flag(name), type=float, default=_default(name))
    for name in ("groups", "candidates", "pairs"):
        parser.add_argument(_flag(name), type=int, default=getattr(BatchSize(), name))
    for name in ("mine_at", "keep_at"):
        parser.add_argument(_flag(name), type=float, nargs="*", default=_default(name))
    for name in ("augmentation", "foreign", "no_answer"):
        parser.add_argument(_flag(name), type=float, default=getattr(Mixture(), name))
    parser.add_argument(
        "--hold-out",
        action="append",
        default=[],
        metavar="SET=SHARE",
        help="keep a share of a set to choose by",
    )
    parser.add_argument(
        "--factor", action="append", default=[], metavar="NAME=NUMBER", help="weight of a source"
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    given = parser.parse_args(arguments)
    try:
        run_training(given.data, given.out, _options(given))
    except (DataError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _default(name: str) -> Any:
    return next(each.default for each in fields(TrainOptions) if each.name == name)


def _numbers(flag: str, pairs: Sequence[str]) -> dict[str, float]:
    found = {}
    for pair in pairs:
        name, _, number = pair.partition("=")
        try:
            found[name] = float(number)
        except ValueError:
            raise DataError(f"{flag} {pair}: write it as NAME=NUMBER") from None
    return found


def _options(given: argparse.Namespace) -> TrainOptions:
    factors = {**DEFAULT_FACTORS, **_numbers("--factor", given.factor)}
    own = {each.name for each in fields(TrainOptions)}
    plain = {name: value for name, value in vars(given).items() if name in own}
    plain |= {
        "factors": factors,
        "size": BatchSize(given.groups, given.candidates, given.pairs),
        "mixture": Mixture(augmentation=given.augmentation, foreign=given.foreign, no_answer=given.no_answer),
        "hold_out": _numbers("--hold-out", given.hold_out),
        "dev": tuple(given.dev),
        "mine_at": tuple(given.mine_at),
        "keep_at": tuple(given.keep_at),
        "compiled": given.compile,
    }
    return TrainOptions(**plain)


if __name__ == "__main__":
    sys.exit(main())
