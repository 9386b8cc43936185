"""What is written down works: ready configs, the README's commands and code, --help, and the layout's rules."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.shapes import make_shaped
from upcycle import plugin
from upcycle.__main__ import main
from upcycle.arch.registry import family, readable
from upcycle.arch.sample import make_llama
from upcycle.cli import frame as cli
from upcycle.cli.main import COMMANDS
from upcycle.config.reading import config_and_source, read, read_own
from upcycle.config.ready import TRAIN
from upcycle.config.schema import UpcycleConfig
from upcycle.io.checkpoint import Checkpoint
from upcycle.planning.plan import build

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs" / "upcycle").glob("*.yaml"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# config.json of the models the ready configs name
LLAMA3 = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "llama3-8b-e8t2": LLAMA3,
    "llama3-8b-e64t8": LLAMA3,
    "nemotron4-15b-e64t8": {
        "model_type": "nemotron", "architectures": ["NemotronForCausalLM"], "hidden_size": 6144,
        "intermediate_size": 24576, "num_hidden_layers": 32, "num_attention_heads": 48, "num_key_value_heads": 8,
        "vocab_size": 256000, "max_position_embeddings": 4096, "hidden_act": "relu2", "partial_rotary_factor": 0.5,
        "norm_eps": 1e-5, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    },
    "qwen3-8b-e56t7-shared": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1000000, "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    },
    "mistral-7b-drop": {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 32000, "max_position_embeddings": 32768, "sliding_window": 4096, "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    },
    **dict.fromkeys(("slices", "llama3-8b-slices"), LLAMA3),
    "marco-nano": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "max_position_embeddings": 32768, "rope_theta": 1000000, "torch_dtype": "bfloat16",
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "vocab_size": 151936, "max_position_embeddings": 32768, "rope_theta": 1000000, "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    },
}  # fmt: skip
# what each config is for: (target, exact, experts, total parameters in billions)
PROMISES = {
    "llama3-8b-e8t2": ("mixtral", True, 8, 47.5),
    "llama3-8b-e64t8": ("upcycled", True, 64, 47.5),
    "slices": ("upcycled", True, 16, 24.9),
    "nemotron4-15b-e64t8": ("upcycled", False, 64, 83.3),
    "qwen3-8b-e56t7-shared": ("upcycled", True, 56, 41.5),
    "mistral-7b-drop": ("mixtral", False, 8, 46.7),
    "marco-nano": ("qwen3_moe", False, 232, 8.0),  # as published: 8B, of which 0.6B active
}

TOKENS = {
    "stories": 200 * 8 * 256,
    "slices": 400 * 64 * 1024,
    "part": 400 * 64 * 1024,
    "llama3-8b-slices": 1e10,
    "qwen3-8b-slices": 1e10,
    "nemotron4-15b-slices": 1e10,
    "llama3-8b-e8t2": 27e9,
    "nemotron4-15b-e64t8": 1e11,
    "qwen3-8b-e56t7-shared": 1e11,
    "qwen3-30b-a3b": 1e10,
    "chat": 500 * 32 * 2048,
    "keep-what-it-knew": 4000 * 64 * 4096,
    "router-first": 200 * 64 * 4096 + 1e9,
    "anneal": 10000 * 256 * 4096,
}


def shaped(folder: Path, config: dict[str, object]) -> Path:
    """A checkpoint of a real model's shape: real headers, no data."""
    if config["model_type"] in plugin.names("upcycle.arch.targets"):  # an MoE already
        module = readable(str(config["model_type"]))
        make_shaped(folder, config, {s.name: s.shape for s in module.slots(module.read(config))}, "bfloat16", 4)
        return folder
    module = family(config["model_type"])
    spec = module.read(config)
    sources = module.sources(spec)
    make_shaped(folder, config, {sources[role].name: shape for role, shape in spec.roles()}, "bfloat16", 4)
    return folder


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_ready_config_plans_what_it_promises(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if path.stem == "tiny":
        make_llama(tmp_path / "runs" / "demo" / "dense")
        assert main(["plan", "tiny"]) == 0
        return
    source = shaped(tmp_path / "dense", MODELS[path.stem])
    config = read(UpcycleConfig, path.stem, [f"source={source}"])
    with Checkpoint.open(source) as checkpoint:
        plan = build(config, [checkpoint])
    target, exact, experts, billions = PROMISES[path.stem]
    assert plan.target == target, plan.why
    assert plan.promise.exact == exact, plan.promise
    assert plan.moe.experts == experts
    assert sum(o.bytes for o in plan.outputs) / 2e9 == pytest.approx(billions, rel=0.01)


def without_journeys(page: Path) -> str:
    """Return the page without the commands that test_journeys.py runs."""
    if page.parent.name == "recipes":
        return ""
    return re.sub(r"^## I have Llama.*?^## ", "## ", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def blocks(language: str = "") -> list[str]:
    fenced = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [block for page in PAGES for found, block in fenced.findall(without_journeys(page)) if found == language]


def command_lines(text: str, *starts: str) -> list[str]:
    """The lines that begin so, without their comments."""
    lines = [line.split("  #")[0].strip() for line in re.sub(r"\\\n\s*", "", text).splitlines()]
    return [line for line in lines if line.startswith(starts)]


def commands(*starts: str) -> list[str]:
    return command_lines("\n".join(blocks()), *starts)


def my_yaml() -> str:
    """The smallest config of docs/training.md."""
    return next(block for block in blocks("yaml") if block.startswith("# my.yaml\n"))


def understood(command: str) -> str:
    """Read, not run: the words of a command, by what its program reads them with. Returns the command's name."""
    from benchmarks import converting, evaluation
    from evaluation.ask.run import read_config as read_evaluation
    from evaluation.chat import read_config as read_chat
    from evaluation.facts.results import ScoreConfig
    from evaluation.facts.suite import WriteConfig
    from evaluation.studies.plan import read_study
    from examples import demo
    from training.cli.join import JoinKeys
    from training.cli.launch import LaunchKeys
    from training.cli.remove import RemoveKeys
    from training.config.reading import read_config
    from training.data.prepare import PrepareConfig
    from training.estimating.bench import BenchConfig
    from training.estimating.estimate import split
    from training.estimating.measure import MeasureConfig
    from training.estimating.recommend import RecommendConfig
    from training.parts.add import AddConfig
    from training.parts.upgrade import UpgradeConfig
    from upcycle.cli.plan import PlanKeys
    from upcycle.cli.quantize import QuantizeKeys

    words = [word for word in shlex.split(command) if not word.startswith("nproc=")]
    name, *words = words[words.index("-m") + 1 :] if "-m" in words else words[1:]
    name = {"training": "train", "benchmarks.kernels": "compare"}.get(name, name)
    if name == "evaluation":
        name, *words = words
    file, keys = cli.file_and_words(words)
    if name in ("plan", "convert"):
        file, keys = config_and_source(read_own(PlanKeys, words)[1])
        read(UpcycleConfig, file, keys)
    elif name == "recommend":
        read(RecommendConfig, "", [f"source={file}", *keys])
    elif name == "estimate" and any(key.startswith("measure=") for key in keys):
        read(MeasureConfig, "", keys)
    elif name in ("train", "estimate", "bench"):
        keys = split(keys)[1] if name == "estimate" else keys
        is_bench = name == "bench" or file.startswith("bench-")
        read(BenchConfig, file, keys, TRAIN) if is_bench else read_config(file, keys)
    elif name == "prepare":
        read(PrepareConfig, "", [f"output={file}", *keys])
    elif name in ("eval", "run"):
        read_evaluation(words)
    elif name == "chat":
        read_chat(words)
    elif name == "quantize":
        cli.named(QuantizeKeys, words, "model")
    elif name == "study":
        read_study(file, keys)
    elif name == "upgrade":
        cli.named(UpgradeConfig, words, "part", "old", "new")
    elif name in ("add", "join", "remove"):
        kind, *places = {"add": (AddConfig, "model"), "join": (JoinKeys, "base"), "remove": (RemoveKeys, "folder")}[
            name
        ]
        own, rest = read_own(kind, [f"{places[0]}={file}", *[word for word in keys if "=" in word]])
        assert own.output and (name == "add" or not rest), command
    elif name == "launch":
        read_config(*cli.file_and_words(read_own(LaunchKeys, words[1:])[1]))
    elif name == "facts":
        verb, *words = words
        cli.named(WriteConfig, words) if verb == "write" else cli.named(ScoreConfig, words, "model")
    elif name == "benchmarks.evaluation":
        read(evaluation.BenchConfig, "", [f"checkpoint={file}", *keys])
    elif name == "benchmarks.converting":
        read(converting.BenchConfig, "", words)
    elif name == "examples.demo":
        read(demo.DemoConfig, file, keys)
    else:
        assert name in (*COMMANDS, "lm-eval"), f"nobody knows how to read: {command}"
    return name


def test_the_pages_code_runs_and_their_commands_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_llama(tmp_path / "runs" / "demo" / "dense")
    for code in blocks("python"):
        exec(compile(code, "README.md", "exec"), {})
    assert main(["plan", "tiny", "scale=published"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    shown = next(block for block in blocks() if block.startswith("$ upcycle plan tiny"))
    assert " ".join(shown.split("\n", 1)[1].split()) in printed
    assert len(commands("upcycle ")) >= 4
    shaped(tmp_path / "llama", LLAMA3)
    (tmp_path / "qwen3-8b").mkdir()  # a source that a page names
    for command in commands("upcycle "):
        verb, *words = shlex.split(command)[1:]
        if verb in ("plan", "convert"):  # planned, not converted: these are real models
            file, keys = config_and_source(words)
            words = [file] * bool(file) + [word for word in keys if not word.startswith("source=")]
            assert main(["plan", *words, f"source={tmp_path / 'llama'}"]) == 0, command
            assert "\nwarning" not in capsys.readouterr().out, command


def test_the_pages_other_commands_say_what_their_programs_understand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read, not run: their models and texts are the reader's. What they do is run by the tests they name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(my_yaml())
    (tmp_path / "qwen3-8b").mkdir()
    lines = [line for line in commands("upcycle ", "python -m ", "torchrun ") if "-m pytest" not in line]
    assert {understood(line) for line in lines} >= {*COMMANDS} - {"export", "inspect", "push"}


def test_the_pages_links_lead_somewhere() -> None:
    from urllib.parse import urlparse

    count = 0
    for page in PAGES:
        for link in re.findall(r"(?:\]\(|src=\")([^)\"\s]+)", page.read_text()):
            if not urlparse(link).scheme:
                count += 1
                assert (page.parent / link.partition("#")[0]).exists(), f"{page.name}: {link}"
    assert count > 20


def test_the_tests_that_the_pages_name_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"pytest (?:-s\s+)?(tests/[\w./]+)", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_the_pages_that_the_configs_name_exist() -> None:
    named = {
        (path.name, page)
        for path in sorted((ROOT / "configs").rglob("*.*"))
        for page in re.findall(r"[\w./-]+\.md\b", path.read_text())
    }
    assert named and all((ROOT / page).is_file() for _, page in named), named


def test_make_targets_that_the_readme_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = {command.split()[1] for command in commands("make ")}
    assert named >= {"demo", "test"}
    for word in named:
        assert re.search(rf"^{word}:", makefile, re.MULTILINE), word


def test_importing_the_converter_does_not_import_transformers() -> None:
    code = "import sys, upcycle.converting.convert, upcycle.converting.make, upcycle.text.observe, upcycle.converting.card, upcycle.verifying.inspect; assert 'transformers' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "train").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_ready_training_config_is_read(path: Path) -> None:
    from training.config.reading import read_config
    from training.estimating.bench import BenchConfig, spec_of

    if path.stem.startswith("bench-"):
        spec = spec_of(read(BenchConfig, path.stem, [], TRAIN))
        assert spec.experts in (8, 32, 64, 128, 256, 384)  # type: ignore[union-attr]
    else:
        config = read_config(path.stem)
        tokens = config.steps * config.batch * config.data.sequence
        assert tokens == pytest.approx(TOKENS[path.stem], rel=0.01)  # what its comments say
