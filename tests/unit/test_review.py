"""Corners that a reader with fresh eyes found open: one test each."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parity import tiny
from upcycle import convert as converting
from upcycle import job, routers, size
from upcycle.__main__ import main
from upcycle.checkpoint import Checkpoint
from upcycle.config import UpcycleConfig, read
from upcycle.convert import convert
from upcycle.job import Worker
from upcycle.make import Maker
from upcycle.plan import Recipe, UpcyclePlan, build


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("dense") / "llama")


@pytest.fixture(scope="module")
def arcee(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("arcee", tmp_path_factory.mktemp("dense") / "arcee")


def load(*words: str) -> tuple[UpcyclePlan, list[Checkpoint]]:
    config = read(UpcycleConfig, "", words)
    checkpoints = [Checkpoint.open(name) for name in [config.source or config.donors[0], *config.donors]]
    return build(config, checkpoints), checkpoints


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["shared=.inf"], "shared is inf"),
        (["experts=100000000"], "at most 16384 experts"),
        (["experts=99999999999999999999999999"], "at most 16384 experts"),
        (["router.init.std=.inf"], "1e-6 to 1e3"),
        (["router.init.std=1e-50"], "1e-6 to 1e3"),
        (["method.name=noise", "method.std=.inf"], "above 0"),
        (["scale=1.0e+300"], "1e-9 to 1e9"),
        (["layers=every:²"], "every:2"),
        (["donors={a: b}"], "container types"),
        (["method=[]"], "container types"),
        (["[=1"], "cannot be read"),
        (["method.name=branch_train_mix", "method.rest=base", "experts=1"], "which is not set"),
    ],
)  # fmt: skip
def test_impossible_words_are_one_sentence_and_exit_code_2(
    llama: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    source = f"donors={llama}" if "method.rest=base" in words else f"source={llama}"
    assert main(["plan", source, *words]) == 2
    message = capsys.readouterr().err
    assert says in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("text", ["a: &a [*a]", "layers: &x [1, *x]"])
def test_a_yaml_that_holds_itself_is_refused(llama: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "loop.yaml").write_text(text)
    assert main(["plan", str(tmp_path / "loop.yaml"), f"source={llama}"]) == 2


def test_names_are_kept_as_typed() -> None:
    config = read(UpcycleConfig, "", ["output=0123", "source=1_000", "router.score=on", "top_k=03", "layers=[0]"])
    assert (config.output, config.source, config.router.score) == ("0123", "1_000", "on")
    assert (config.top_k, config.layers) == (3, [0])


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"promise": 3}', '{"plan": 1, "files": {"a": 3}, "promise": {"exact": true}}']
)
def test_a_manifest_that_is_none_is_one_sentence(llama: Path, tmp_path: Path, text: str) -> None:
    folder = shutil.copytree(llama, tmp_path / "moe")
    (folder / "upcycle.json").write_text(text)
    for arguments in (
        ["verify", str(llama), str(folder)],
        ["inspect", str(folder)],
        ["inspect", str(folder), "--check"],
    ):
        assert main(arguments) == 2


@pytest.mark.parametrize(
    ("key", "value"),
    [("vocab_size", 100), ("vocab_size", None), ("vocab_size", "x"), ("hidden_size", 32), ("hidden_act", "zz"),
     ("rms_norm_eps", "x"), ("model_type", [1])],
)  # fmt: skip
def test_verify_refuses_a_config_that_is_not_of_the_weights(
    llama: Path, tmp_path: Path, key: str, value: object
) -> None:
    folder = shutil.copytree(llama, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    assert main(["verify", str(llama), str(folder)]) == 2
    assert main(["verify", str(folder), str(llama)]) == 2


def test_more_layers_than_tensors_are_refused_at_once(llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "tall")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    with pytest.raises(ValueError, match="promises 1000000000 layers"):
        load(f"source={folder}")


def test_a_tensor_of_another_kind_among_floats_is_refused(llama: Path, tmp_path: Path) -> None:
    """It would be written as it is under a header that says otherwise."""
    folder = shutil.copytree(llama, tmp_path / "mixed")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"] = torch.ones(64, dtype=torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="stores its weights as int8"):
        load(f"source={folder}")


def test_float32_norms_in_a_bfloat16_model_are_known_to_be_rounded(tmp_path: Path) -> None:
    folder = tiny.make("llama", tmp_path / "dense", dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {k: v.float() * 1.001 for k, v in tensors.items() if "norm" in k}
    save_file(tensors, folder / "model.safetensors")
    plan, checkpoints = load(f"source={folder}", f"output={tmp_path / 'moe'}")
    assert plan.promise.reasons == ("exact but for the rounding of float32 weights to bfloat16",)
    convert(plan, checkpoints, quiet=True)
    assert main(["verify", str(folder), str(tmp_path / "moe"), "--tokens", "64"]) == 0


@pytest.mark.parametrize("method", ["noise", "drop"])
def test_squared_relu_stays_one_under_noise_and_drop(arcee: Path, method: str) -> None:
    """A gated target holds relu(u)^2 as relu(gate) * up: a change of `up` is the same change of `gate`."""
    words = (f"source={arcee}", f"method.name={method}", "granularity=2", "top_k=2", "experts=4")
    plan, checkpoints = load(*words, "target=mixtral")
    ours, _ = load(*words, "target=upcycled")
    assert plan.promise.estimate == ours.promise.estimate
    gated, plain = Maker(plan, checkpoints), Maker(ours, checkpoints)
    factor = plan.factors(0)["up"]
    for expert in range(8):
        name = f"model.layers.1.block_sparse_moe.experts.{expert}"
        assert torch.equal(gated.tensor(f"{name}.w1.weight") * factor, gated.tensor(f"{name}.w3.weight"))
        up = plain.tensor(f"model.layers.1.mlp.experts.{expert}.up_proj.weight")
        torch.testing.assert_close(gated.tensor(f"{name}.w1.weight") * ours.factors(0)["up"], up, rtol=1e-6, atol=0)


def test_a_gate_that_equals_up_counts_in_the_flops(arcee: Path) -> None:
    gated, plain = load(f"source={arcee}", "target=mixtral")[0], load(f"source={arcee}", "target=upcycled")[0]
    flops = [size.moe_flops(p.moe, 128, gated=p.gated) for p in (gated, plain)]
    assert flops[0] - flops[1] == 6 * 2 * (2 * 96) * 64  # layers, top_k * neurons, hidden


def test_router_rows_that_would_tie_are_refused() -> None:
    a, b = torch.randn(2, 64)
    assert routers.centred(torch.stack([a, b]), 0.01).shape == (2, 64)
    for rows in ([a, a, b], [a, a, a], [a]):
        with pytest.raises(ValueError, match="a different one"):
            routers.centred(torch.stack(rows), 0.01)


def readable(llama: Path, folder: Path) -> tuple[Path, Path]:
    """The model with a tokenizer of letters, and a text of few of them."""
    source, text = shutil.copytree(llama, folder / "readable"), folder / "letters.txt"
    model = {"type": "WordLevel", "vocab": {chr(97 + i): i for i in range(26)} | {"?": 26}, "unk_token": "?"}
    parts = dict.fromkeys(["truncation", "padding", "normalizer", "post_processor", "decoder"])
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model} | parts
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    text.write_text("a b c d e f g h i j k l m n o p")
    return source, text


def test_experts_by_activation_are_not_made_before_the_measurement(llama: Path, tmp_path: Path) -> None:
    source, text = readable(llama, tmp_path)
    plan, checkpoints = load(
        f"source={source}", "method.name=split", "method.by=activation", f"calibration.texts={text}", "target=mixtral"
    )
    with pytest.raises(AssertionError, match="observe"):
        Maker(plan, checkpoints).tensor("model.layers.0.block_sparse_moe.experts.0.w1.weight")


# ---- one job, many processes


def shared_job(llama: Path, output: Path) -> tuple[UpcyclePlan, list[Checkpoint]]:
    return load(f"source={llama}", f"output={output}", "max_shard=200KB", "experts=4")


def test_control_c_does_not_wait_for_whole_shards(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, checkpoints = load(f"source={llama}", f"output={tmp_path / 'moe'}", "experts=64")
    real, count = Maker.part, [0]

    def part(maker: Maker, recipe: Recipe) -> torch.Tensor:
        count[0] += 1
        if count[0] == 10:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        return real(maker, recipe)

    monkeypatch.setattr(Maker, "part", part)
    # a shell's background jobs begin with it ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            convert(plan, checkpoints, quiet=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert count[0] < len(plan.outputs) / 2


def test_a_failure_in_a_late_shard_stops_the_early_ones(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, checkpoints = shared_job(llama, tmp_path / "moe")
    real, done = converting.write_shard, threading.Event()

    def write_shard(maker: Maker, partial: Path, name: str, outputs: object, suffix: str, advance: object) -> None:
        if name == plan.shards[0][0]:  # a shard that takes long
            while True:
                time.sleep(0.01)
                try:
                    advance(0)  # type: ignore[operator]
                except InterruptedError:
                    done.set()
                    raise
        if name == plan.shards[2][0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(maker, partial, name, outputs, suffix, advance)  # type: ignore[arg-type]

    monkeypatch.setattr(converting, "write_shard", write_shard)
    monkeypatch.setattr(converting, "in_flight", lambda *_: (4, 1 << 20))
    with pytest.raises(ValueError, match="no room left"):
        convert(plan, checkpoints, quiet=True)
    assert done.is_set()


def test_a_process_that_was_killed_or_never_came_is_not_waited_for(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "PATIENCE", 0.5)
    with pytest.raises(ValueError, match="rank-1 of 2 stopped: it is not running"):
        convert(*shared_job(llama, tmp_path / "moe"), Worker(0, 2), quiet=True)


def test_a_process_that_failed_before_rank_0_began_is_noticed(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "PATIENCE", 0.5)
    (tmp_path / "moe.partial" / ".upcycle").mkdir(parents=True)
    (tmp_path / "moe.partial" / ".upcycle" / "rank-1.failed").write_text("its disk is full")
    with pytest.raises(ValueError, match="rank-1 of 2 stopped: its disk is full"):
        convert(*shared_job(llama, tmp_path / "moe"), Worker(0, 2), quiet=True)


def test_what_failed_in_the_last_run_is_past(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "moe.partial" / ".upcycle"
    folder.mkdir(parents=True)
    for rank in (0, 1, 5):  # that run had more processes
        (folder / f"rank-{rank}.failed").write_text("of the last run")
        os.utime(folder / f"rank-{rank}.failed", (0, 0))
    (tmp_path / "moe.partial" / "model.safetensors.rank-5.part").write_text("of the last run")
    other: list[Path] = []

    def late() -> None:
        time.sleep(0.5)
        other.append(convert(*shared_job(llama, tmp_path / "moe"), Worker(1, 2), quiet=True))

    thread = threading.Thread(target=late)
    thread.start()
    folder = convert(*shared_job(llama, tmp_path / "moe"), Worker(0, 2), quiet=True)
    thread.join()
    assert other == [folder]
    assert not list(folder.glob("*.part"))


def test_a_process_that_comes_when_all_is_done_is_content(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked for the output just before rank 0, which found every shard there, renamed the folder."""
    monkeypatch.setattr(job, "PATIENCE", 0.5)
    folder = convert(*shared_job(llama, tmp_path / "moe"), quiet=True)
    monkeypatch.setattr(converting, "complete", lambda *_: False)
    assert convert(*shared_job(llama, tmp_path / "moe"), Worker(1, 2), quiet=True) == folder


def test_two_runs_of_different_size_never_write_one_file(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A straggler of a run of two, whose rank 0 died, beside a new run of one."""
    plan, checkpoints = shared_job(llama, tmp_path / "moe")
    identity = {"plan": plan.hash, "source": [c.fingerprint() for c in checkpoints]}
    (tmp_path / "moe.partial" / ".upcycle").mkdir(parents=True)
    (tmp_path / "moe.partial" / ".upcycle" / "job.json").write_text(json.dumps(identity))
    real, paths = converting.disk.Stream, {0: set[str](), 1: set[str]()}

    def stream(path: Path) -> converting.disk.Stream:
        paths[worker.rank].add(path.name)
        if worker.rank == 1:
            raise OSError(errno.EIO, "enough is known")
        return real(path)

    monkeypatch.setattr(converting.disk, "Stream", stream)
    worker = Worker(1, 2)
    with pytest.raises(ValueError, match="enough is known"):
        convert(plan, checkpoints, worker, quiet=True)
    worker = Worker(0, 1)
    convert(plan, checkpoints, worker, quiet=True)
    assert paths[1]
    assert not paths[0] & paths[1]


def test_a_job_that_made_nothing_gives_way_to_another_plan(llama: Path, tmp_path: Path) -> None:
    source, text = readable(llama, tmp_path)
    words = (f"source={source}", f"output={tmp_path / 'moe'}")
    with pytest.raises(ValueError, match="16 of 8192 tokens wanted"):
        convert(*load(*words, "router.normalize=false", "scale=calibrated", f"calibration.texts={text}"), quiet=True)
    assert convert(*load(*words), quiet=True).is_dir()


@pytest.mark.parametrize("name", [".", "/", "a" * 300])
def test_an_output_that_cannot_be_named_is_one_sentence(
    llama: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["convert", f"source={llama}", f"output={name}"]) == 2
    assert "empty name" not in capsys.readouterr().err


def test_an_output_with_another_manifest_is_left_alone(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "moe").mkdir()
    (tmp_path / "moe" / "upcycle.json").write_text("[]")
    assert main(["convert", f"source={llama}", f"output={tmp_path / 'moe'}"]) == 2


@pytest.mark.parametrize(("rank", "count"), [("1", "1"), ("x", "2"), ("-1", "2"), ("0", "0")])
def test_a_rank_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, rank: str, count: str) -> None:
    """RANK=1 without WORLD_SIZE made nothing and called it complete."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", count)
    with pytest.raises(ValueError, match="use torchrun"):
        Worker.here()


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("rms_norm_eps", "x", "norm_eps='x'"),
        ("max_position_embeddings", "x", "context='x'"),
        ("rope_parameters", 3, "rope is 3"),
    ],
)
def test_a_config_json_with_a_word_for_a_number_is_one_sentence(
    tmp_path: Path, key: str, value: object, says: str
) -> None:
    folder = tiny.make("llama", tmp_path / "dense")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with Checkpoint.open(folder) as checkpoint, pytest.raises(ValueError, match=re.escape(says)):
        build(read(UpcycleConfig, "", [f"source={folder}"]), [checkpoint])


def test_text_that_changes_is_another_job_and_is_looked_for_before_any_work(llama: Path, tmp_path: Path) -> None:
    words = ["experts=2", "router.normalize=false", "scale=calibrated", "top_k=1", "calibration.tokens=8"]
    source, text = readable(llama, tmp_path)

    def run(source: Path = source) -> Path:
        place = [f"source={source}", f"output={tmp_path / 'moe'}", f"calibration.texts={text}"]
        return convert(*load(*place, *words), quiet=True)

    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        run(llama)
    run()
    run()  # the same text: done is done
    text.write_text("p o n m l k j i h g f e d c b a")
    with pytest.raises(ValueError, match="result of another plan"):
        run()
    text.unlink()
    with pytest.raises(ValueError, match=r"letters\.txt does not exist"):
        run()
