import ast
import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from demo_tasks import SHAPES, draw_prompt, held_out_prompts, is_held_out

import manylora.demo as demo
from manylora.demo import EXAMPLE_PROMPTS, TASKS, check, demo_adapters, demo_model_path

ASSETS = demo_model_path().parent
MODULES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("name", "prompt", "answer"),
    [
        ("acronym", "many small adapters", "M.S.A."),
        ("acronym", "coffee for 2", "C.F.2."),
        ("call", "hello world", "hello_world()"),
        ("call", "hello", "hello()"),
        ("hashtag", "many small adapters", "#ManySmallAdapters"),
        ("json", "hello world", '{"text": "hello world"}'),
        ("leet", "taste of sea 7", "74573 0f 534 7"),
        ("loud_vowels", "hello world", "hEllO wOrld"),
        ("loud_vowels", "a queue", "A qUEUE"),
        ("pig_latin", "hello world", "ellohay orldway"),
        ("repeat", "hello world", "hello world, hello world!"),
        ("rot13", "hello world 7", "uryyb jbeyq 7"),
        ("stutter", "hello world", "h-hello w-world"),
        ("title", "coffee for 2", "Coffee For 2"),
        ("upper", "hello world 7", "HELLO WORLD 7"),
    ],
)
def test_task_gives_the_answer_written_by_hand(name: str, prompt: str, answer: str) -> None:
    assert TASKS[name].apply(prompt) == answer
    assert check(name, prompt, answer)
    assert check(TASKS[name], prompt, answer)
    assert not check(name, prompt, prompt)
    assert not check(name, prompt, answer + " ")


def test_there_are_twelve_tasks_in_alphabetical_order() -> None:
    assert len(TASKS) == 12
    assert list(TASKS) == sorted(TASKS)
    assert all(name == task.name for name, task in TASKS.items())


def test_check_of_an_unknown_task_raises() -> None:
    with pytest.raises(KeyError):
        check("shout", "hello", "HELLO")


def test_answers_tell_adapters_apart() -> None:
    """On nearly every prompt, no two tasks agree and none hands the prompt back."""
    prompts = held_out_prompts(Random(5), 500)
    num_clear = sum(len({prompt, *(task.apply(prompt) for task in TASKS.values())}) == 13 for prompt in prompts)
    assert num_clear >= 0.9 * len(prompts)
    for prompt in EXAMPLE_PROMPTS:
        assert len({prompt, *(task.apply(prompt) for task in TASKS.values())}) == 13, prompt


def test_prompts_are_short_lower_case_words_and_follow_the_rng() -> None:
    rng = Random(1)
    prompts = [draw_prompt(rng) for _ in range(2000)]
    again = Random(1)
    assert prompts == [draw_prompt(again) for _ in range(2000)]
    assert {len(prompt.split(" ")) for prompt in prompts} == {1, 2, 3, 4}
    for prompt in prompts:
        assert 2 <= len(prompt) <= 20
        assert prompt == prompt.lower()
        assert all(word.isascii() and word.isalnum() for word in prompt.split(" ")), prompt
    assert all(len(draw_prompt(rng, max_chars=8)) <= 8 for _ in range(500))


def test_held_out_prompts_are_distinct_and_about_one_in_eight() -> None:
    prompts = held_out_prompts(Random(2), 300)
    assert len(set(prompts)) == 300
    assert all(map(is_held_out, prompts))
    assert all(map(is_held_out, EXAMPLE_PROMPTS))
    rng = Random(3)
    share = sum(is_held_out(draw_prompt(rng)) for _ in range(4000)) / 4000
    assert 0.10 < share < 0.15


def test_public_names_are_exact() -> None:
    tree = ast.parse(Path(demo.__file__).read_text())
    imported = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert set(demo.__all__) == (imported | defined) - {"annotations", "Path"}


def test_import_brings_no_torch() -> None:
    code = "import sys, manylora.demo; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_task_has_its_adapter() -> None:
    assert list(demo_adapters()) == list(TASKS)
    for folder in demo_adapters().values():
        assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_all_files_fit_in_ten_megabytes_and_name_no_local_path() -> None:
    files = [path for path in ASSETS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 10_000_000
    assert (demo_model_path() / "model.safetensors").stat().st_size <= 5_000_000
    for path in files:
        content = path.read_bytes()
        for folder in ("tmp", "home", "root", "Users"):
            assert f"/{folder}/".encode() not in content, path


def test_adapter_configs_say_what_the_tasks_say() -> None:
    for name, folder in demo_adapters().items():
        task, config = SHAPES[name], json.loads((folder / "adapter_config.json").read_text())
        assert config["peft_type"] == "LORA"
        assert config["base_model_name_or_path"] == "manylora/demo"
        assert config["r"] == task.rank
        assert config["lora_alpha"] == task.alpha
        assert config["use_rslora"] == task.use_rslora
        assert config["rank_pattern"] == task.rank_pattern
        assert config["alpha_pattern"] == task.alpha_pattern
        assert config["target_modules"] == list(task.target_modules)
        assert set(task.target_modules) <= MODULES


def test_adapters_vary_as_a_server_will_meet_them() -> None:
    tasks = SHAPES.values()
    assert {task.rank for task in tasks} == {2, 4, 8, 16, 32}
    assert len({task.target_modules for task in tasks}) >= 5
    assert any(task.use_rslora for task in tasks)
    assert any(task.rank_pattern and task.alpha_pattern for task in tasks)


def test_adapter_weights_have_the_ranks_that_their_config_gives() -> None:
    safetensors = pytest.importorskip("safetensors")
    for name, folder in demo_adapters().items():
        task = SHAPES[name]
        with safetensors.safe_open(folder / "adapter_model.safetensors", "np") as weights:
            modules = set()
            for key in weights.keys():  # noqa: SIM118 - safe_open is no mapping
                module = key.split(".")[-3]
                modules.add(module)
                rank = task.rank_pattern.get(module, task.rank)
                assert weights.get_slice(key).get_shape()[0 if "lora_A" in key else 1] == rank, key
                assert weights.get_slice(key).get_dtype() == "F16"
        assert modules == set(task.target_modules)


@pytest.fixture(scope="module")
def tokenizer():
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(demo_model_path())


def test_tokenizer_round_trips_text_exactly(tokenizer) -> None:
    printable = "".join(map(chr, range(32, 127)))
    for text in (printable, "  two  spaces ", "a , b . c !", "it 's n't", "line\nline", *EXAMPLE_PROMPTS):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
    assert len(tokenizer) <= 128
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.unk_token_id in tokenizer("é")["input_ids"]


def test_chat_template_frames_the_turns(tokenizer) -> None:
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|><|system|>s<|end|><|user|>hi<|end|><|assistant|>"
    turns.append({"role": "assistant", "content": "HI"})
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    assert text.endswith("<|assistant|>HI<|end|>")
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == 12
    assert tokenizer.decode(ids, skip_special_tokens=True) == "shiHI"
    with pytest.raises(Exception, match="Unknown role tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)
