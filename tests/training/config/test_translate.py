"""Configs of other trainers, as their pages have them, become settings that train.py reads."""

import math
import re
import sys
from types import SimpleNamespace

import pytest

from training.config.__main__ import main
from training.flags import given_flags
from training.host import errors
from training.run.settings import TrainConfig, check_config

AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
load_in_8bit: false
load_in_4bit: true
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
  - path: rows.jsonl
    field_messages: chat
val_set_size: 0.1
adapter: qlora
lora_model_dir:
sequence_len: 2048
sample_packing: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules: [q_proj, v_proj, lm_head]
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
flash_attention: true
warmup_ratio: 0.1
evals_per_epoch: 4
deepspeed: deepspeed_configs/zero3.json
weight_decay: 0.0
"""
LLAMA_FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: dpo
do_train: true
finetuning_type: lora
lora_target: all
pref_beta: 0.2
pref_loss: simpo
simpo_gamma: 0.7
dataset: dpo_en_demo,mine
template: llama3
cutoff_len: 2048
max_steps: 1000
warmup_ratio: 0.1
save_steps: 500
per_device_train_batch_size: 1
learning_rate: 5.0e-6
lr_scheduler_type: constant_with_warmup
report_to: none
use_rslora: true
"""
TRL = """
model_name_or_path: ./Qwen3-0.6B
dataset_name: trl-lib/Capybara
learning_rate: 2e-5
packing: true
packing_strategy: wrapped
max_length: 1024
per_device_train_batch_size: 2
eval_strategy: steps
eval_steps: 100
use_peft: true
report_to: [wandb, tensorboard, mlflow]
beta: 0.05
loss_type: ipo
"""
SWIFT = """
model: Qwen/Qwen2.5-7B-Instruct
tuner_type: full
dataset: [AI-ModelScope/alpaca#500]
lora_rank: 8
split_dataset_ratio: 0.01
truncation_strategy: delete
ddp_timeout: 1800
save_strategy: "no"
save_steps: 50
max_length: 2048
rope_scaling: {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768}
"""
TORCHTITAN = """
[job]
dump_folder = "outputs"
[model]
name = "qwen3"
flavor = "4B"
[optimizer]
name = "AdamW"
lr = 3e-4
[lr_scheduler]
warmup_steps = 200
min_lr_factor = 0.1
[training]
local_batch_size = 1
global_batch_size = 16
seq_len = 8192
steps = 1000
dataset = "c4"
[parallelism]
tensor_parallel_degree = 2
context_parallel_degree = 1
pipeline_parallel_degree = 1
[checkpoint]
interval = 500
"""
VERL = """
data: {train_files: train.parquet, train_batch_size: 1024, max_prompt_length: 512, max_response_length: 1024}
actor_rollout_ref:
  model: {path: Qwen/Qwen3-8B}
  actor: {optim: {lr: 1e-6}, ppo_micro_batch_size_per_gpu: 32, kl_loss_coef: 0.001}
  rollout: {name: vllm, n: 5}
critic: {optim: {lr: 1e-5}}
algorithm: {adv_estimator: grpo}
trainer: {project_name: gsm8k, logger: [console, wandb], n_gpus_per_node: 8, total_epochs: 15, test_freq: -1,
  default_local_dir: "checkpoints/${trainer.project_name}"}
"""
CASES = {
    "axolotl": (AXOLOTL, {
        "init_from": "Llama-3.2-1B", "lora": 16, "lora_alpha": 32.0,
        "lora_targets": "q_proj,v_proj", "lora_bits": 4,
        "data": ["GPT4-LLM-Cleaned", "rows.jsonl"], "validation_fraction": 0.1,
        "context_length": 2048,
        "packing": "best_fit", "gradient_accumulation_steps": 2, "batch_size": 2, "epochs": 1.0,
        "learning_rate": 2e-4,
        "columns": "messages=chat",
        "final_learning_rate_ratio": 0.0, "weight_decay": 0.0,
    }, ["hf download NousResearch/Llama-3.2-1B --local-dir Llama-3.2-1B",
        "hf download teknium/GPT4-LLM-Cleaned --repo-type dataset --local-dir GPT4-LLM-Cleaned",
        "without lm_head", "type left out", "warmup_ratio = 0.1: 0.1 of the run's steps",
        "lora_dropout = 0.05: adapters are plain LoRA", "FSDP2 shards weights",
        "flash_attention = true: the fastest",
        "evals_per_epoch = 4: validation_interval is a number of steps",
        "here: load_in_8bit, lora_model_dir"]),
    "LLaMA-Factory": (LLAMA_FACTORY, {
        "init_from": "Meta-Llama-3-8B-Instruct", "lora": 8, "lora_targets": "all-linear",
        "objective": "simpo",
        "lora_alpha": 16 * math.sqrt(8),
        "beta": 0.2, "margin": 0.7, "data": ["data/dpo_en_demo.json", "data/mine.json"],
        "context_length": 2048,
        "max_steps": 1000, "warmup_steps": 100, "checkpoint_interval": "500", "batch_size": 1,
        "learning_rate": 5e-6,
        "final_learning_rate_ratio": 1.0, "weight_decay": 0.0,
    }, ["template = \"llama3\": the template in init_from's folder",
    "dataset_info.json names the file of mine"]),
    "TRL": (TRL, {
        "init_from": "./Qwen3-0.6B", "data": ["Capybara"], "learning_rate": 2e-5,
        "packing": "best_fit", "lora": 16,
        "lora_alpha": 32.0, "context_length": 1024, "batch_size": 2, "validation_interval": 100,
        "wandb": "fathom",
        "tensorboard": True, "objective": "ipo", "beta": 0.05, "epochs": 3.0, "weight_decay": 0.0,
        "warmup_steps": 0,
        "lora_targets": "q_proj,v_proj", "final_learning_rate_ratio": 0.0,
    }, ["report_to.mlflow = true: metrics go to --tensorboard",
        'packing_strategy = "wrapped": packing is set by packing',
        "# the default of TRL"]),
    "ms-swift": (SWIFT, {
        "init_from": "Qwen2.5-7B-Instruct", "data": ["alpaca"], "validation_fraction": 0.01,
        "overlong": "drop",
        "collective_timeout": 30, "save": "none", "context_length": 2048, "epochs": 3.0,
        "weight_decay": 0.1,
        "batch_size": 1, "final_learning_rate_ratio": 0.0, "learning_rate": 1e-5,
        "rope_scaling": "yarn:4:32768",
    }, ["all of AI-ModelScope/alpaca, not 500 rows", "lora_rank = 8: every weight is trained",
        "checkpoint_interval has no effect with save none"]),
    "torchtitan": (TORCHTITAN, {
        "model_size": "4B", "learning_rate": 3e-4, "warmup_steps": 200,
        "final_learning_rate_ratio": 0.1,
        "batch_size": 1, "gradient_accumulation_steps": 16, "context_length": 8192,
        "max_steps": 1000,
        "tensor_parallel_size": 2, "checkpoint_interval": "500", "output_dir": "outputs",
    }, ["16 / (1 x 1)", "a name that torchtitan knows", "No data are named",
    "parallelism.pipeline_parallel_degree"]),
    "verl": (VERL, {
        "init_from": "Qwen3-8B", "data": ["train.parquet"], "context_length": 1536,
        "learning_rate": 1e-6,
        "batch_size": 32, "objective": "grpo", "wandb": "gsm8k", "epochs": 15.0,
        "output_dir": "checkpoints/gsm8k", "final_learning_rate_ratio": 1.0, "warmup_steps": 0,
        "weight_decay": 0.01,
        "clip_low": 0.2, "clip_high": 0.2,
    }, ["kl_loss_coef = 0.001: use_kl_loss is off",
        "512 of a prompt and 1024 of an answer", "1024 / (batch_size x GPUs)",
        "critic.optim.lr = \"1e-5\": PPO writes",
        "no rollouts are written or scored here", "torchrun starts the processes",
        "trainer.test_freq"]),
}  # fmt: skip


@pytest.mark.parametrize("trainer", CASES)
def test_a_config_becomes_settings_that_train_reads(trainer, tmp_path, capsys, monkeypatch):
    """Nothing is left out in silence: each of their settings stands in the text."""
    text, values, said = CASES[trainer]
    theirs, ours = (
        tmp_path / ("run.toml" if trainer == "torchtitan" else "run.yaml"),
        tmp_path / "ours.toml",
    )
    theirs.write_text(text)
    assert main([str(theirs)]) == 0
    printed = capsys.readouterr().out
    ours.write_text(printed)
    assert f"a config of {trainer}." in printed and all(each in printed for each in said), printed
    given = given_flags(TrainConfig, ["--config", str(ours)], "train.py")
    assert given == values
    monkeypatch.setattr("training.run.settings.import_optional", lambda *_: None)
    check_config(TrainConfig(**given), given)
    names = re.findall(r"^\s*([a-z]\w+)(?=:| = )", text, re.MULTILINE)
    assert len(names) > 8 and [name for name in names if f"{name}" not in printed] == []


@pytest.mark.parametrize(("text", "said"), [
    ("base_model: x\nmicro_batch_size: 1\nrope_scaling: yarn\n",
     '# rope_scaling = "yarn": a way and a factor are asked'),
    ("model_name_or_path: x\nnum_generations: 8\n", 'objective = "dapo"  # guessed by '
                                                    'num_generations'),
    ("model_name_or_path: x\nnum_generations: 8\n",
     "# No length is named: give context_length; 512 tokens by default"),
    ("model_name_or_path: x\nuse_peft: true\n", "context_length = 1024  # the default of TRL"),
    ("base_model: x\nadapter: qlora\n", "lora_bits = 4  # adapter = qlora"),
    ("model: {path: x, lora_rank: 4, lora_alpha: 16}\noptim: {lr: 1}\n",
     "lora_alpha = 16.0  # model.lora_alpha"),
    ("optim: {lr: 1}\nengine: {ulysses_sequence_parallel_size: 2}\n",
     "context_parallel_size = 2  # engine.ulysses"),
    ("data: {train_batch_size: 256, micro_batch_size_per_gpu: 4, train_files: x}\ntrainer: "
     "{n_gpus_per_node: 8}\n",
     "gradient_accumulation_steps = 8  # data.train_batch_size = 256: on 8 GPUs: 256 / (4 x 8)"),
    ("max_steps: 20\nseed: 3\n", "a config of no trainer that is known here"),
    ("base_model: x\nlearning_rate: 5\n",
     "# learning_rate = 5: learning_rate must be between 1e-12 and 1.0, got 5.0"),
    ("base_model: x\ncolour: red\n", '# Unknown here: colour = "red"'),
    ("model_name_or_path: x\nuse_peft: false\nepsilon: 0.3\n", "clip_high = 0.3  # the default of "
                                                               "TRL"),
    ("model_name_or_path: x\nuse_peft: false\nloss_type: cispo\nepsilon_high: "
     "5.0\nnum_generations: 8\n",
     "clip_high = 4.0  # epsilon_high"),
    ("model_name_or_path: x\nmax_length: 512\n", "learning_rate = 2e-05  # the default of TRL"),
    ("model_name_or_path: x\nuse_peft: false\nloss_type: kto\ndesirable_weight: 1.0\n",
     "learning_rate = 1e-06  # the default of TRL"),
    ("model_name_or_path: x\nmax_length: 512\n", "final_learning_rate_ratio = 0.0  # the default "
                                                 "of TRL"),
    ("model_name_or_path: x\nuse_peft: false\nloss_type: [sigmoid, sft]\nloss_weights: [2.0, "
     "0.5]\n",
     "nll_weight = 0.25  # loss_weights"),
    ("model_name_or_path: x\nuse_peft: false\nloss_type: [sft, sigmoid]\n",
     "nll_weight = 1.0  # the default of TRL"),
    ("model_name_or_path: x\nuse_peft: false\nloss_type: [sigmoid, bco_pair]\n",
     "loss_type = [\"sigmoid\", \"bco_pair\"]: objective is"),
    ("model_name_or_path: x\nuse_peft: false\npacking: false\n",
     "# packing = false: documents share a sequence"),
    ("model_name_or_path: x\nuse_peft: false\nassistant_only_loss: false\n",
     "# assistant_only_loss = false: prompts"),
    ("model_name_or_path: x\nuse_peft: false\nchat_template_kwargs: {enable_thinking: false}\n",
     "enable_thinking = false: a row's chat_template_kwargs"),
    ("model_name_or_path: x\nmax_length: 5\noverwrite_output_dir: true\n",
     "overwrite_output_dir = true: a run writes into no folder of another run"),
    ("base_model: x\nmicro_batch_size: 1\nrl: simpo\n", "beta = 0.1  # the default of axolotl"),
    ("base_model: x\nsequence_len: 512\n", "batch_size = 1  # the default of axolotl"),
    ("base_model: x\nlr_scheduler: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.2}\n",
     "final_learning_rate_ratio = 0.2  # lr_scheduler_kwargs.min_lr_rate"),
    ("data: {train_files: x}\nactor: {kl_loss_coef: 0.1, use_kl_loss: true}\nalgorithm: "
     "{adv_estimator: grpo}\n",
     "beta = 0.1  # actor.kl_loss_coef"),
    ("model_name_or_path: x\nuse_peft: true\n", 'lora_targets = "q_proj,v_proj"  # the default of '
                                                'TRL'),
    ("model_name_or_path: x\nuse_peft: true\nmax_length: null\n", "# No length is named"),
    ("model_name_or_path: x\nuse_peft: true\nbeta: 0.1\nloss_type: apo_zero\n",
     '# Their loss is none of these here: loss_type = "apo_zero"; next tokens are trained, or give '
     'objective'),
    ("model_name_or_path: x\nuse_peft: true\nmax_steps: 30\nwarmup_ratio: 0.05\n", "warmup_steps = 2  # warmup_ratio"),
    ("base_model: x\nsequence_len: 8\nmax_steps: 90\nwarmup_ratio: 0.03\n", "warmup_steps = 2  # warmup_ratio"),
    ("base_model: x\nsequence_len: 8\nmax_steps: 90\n", "warmup_steps = 2  # the default of "
                                                        "axolotl"),
    ("base_model: x\nsequence_len: 8\nchat_template: jinja\nchat_template_jinja: a.jinja\n",
     "here: chat_template\n"),
    ("compute_environment: LOCAL_MACHINE\nnum_processes: 8\n", "a config of accelerate"),
])  # fmt: skip
def test_what_is_said_of_a_setting(text, said, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(text)
    assert main([str(tmp_path / "run.yaml")]) == 0
    assert said in capsys.readouterr().out


CHATS = """
base_model: x
datasets:
  - {path: a.jsonl, type: chat_template, field_messages: dialogue, roles_to_train: [assistant], train_on_eos: turn,
     roles: {user: [human], assistant: [gpt]}, message_property_mappings: {role: from, content: value}}
"""
OTHERS = """
base_model: x
datasets:
  - {path: a.jsonl, type: chat_template, field_messages: dialogue, roles_to_train: [assistant, user],
     train_on_eos: last, roles: {assistant: [bot]}, message_property_mappings: {role: speaker, content: value}}
  - {path: b.jsonl, type: completion, field: body}
  - {path: c.jsonl, type: {field_instruction: q, field_output: a, format: "{instruction}"}}
  - {path: d.jsonl, field_messages: talk, message_field_training: learn, split: test}
  - {path: e.jsonl, field_messages: conversations, message_field_role: from, message_field_training: train}
"""


def test_what_datasets_of_axolotl_say_of_their_rows(tmp_path, capsys):
    """Names of fields are columns. What is read anyway is silent, and the rest has a reason."""
    given, texts = [], []
    for text in (CHATS, CHATS + "rl: dpo\n", OTHERS):
        (tmp_path / "run.yaml").write_text(text)
        assert main([str(tmp_path / "run.yaml"), str(tmp_path / "run.toml")]) == 0, (
            capsys.readouterr().err
        )
        given.append(given_flags(TrainConfig, ["--config", str(tmp_path / "run.toml")], "train.py"))
        texts.append((tmp_path / "run.toml").read_text())
    columns = [each["columns"] for each in given]
    assert columns == [
        "messages=dialogue",
        "prompt=dialogue",
        "messages=dialogue,text=body,prompt=q,completion=a",
    ]
    assert "Left out" not in texts[0] and "read: type left out" in texts[0]
    for said in (
        'roles_to_train = ["assistant", "user"], datasets: train_on_eos = "last": each turn of the '
        "assistant is",
        'roles = {"assistant": ["bot"]}: known are user',
        '{"role": "speaker", "content": "value"}: a message has role and content, or from and '
        "value",
        'field_messages = "talk": columns has messages=dialogue already',
        'message_field_training = "learn": a message\'s weight, train',
        "type, split left out",
    ):
        assert said in texts[2], texts[2]
    assert "message_field_role" not in texts[2]


@pytest.mark.parametrize(("text", "message"), [
    ("a: &a\n  b: *a\n", "more than 10000 values, or one within itself"),
    ("- a\n- b\n", "holds no settings"),
    ("", "holds no settings"),
    ("a: [\n", "is no YAML: while parsing"),
    ("colour: red\n", "no setting that is known here"),
    ("!!python/object/apply:os.system ['true']\n", "is no YAML: could not determine a constructor"),
])  # fmt: skip
def test_files_that_are_no_config(text, message, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(text)
    assert main([str(tmp_path / "run.yaml")]) == 1
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and len(error.splitlines()) == 1


def test_values_of_wrong_types_are_left_out_with_a_reason(tmp_path, capsys):
    """A value that no trainer takes, at each name that is read, is a comment: the rest is
    translated."""
    names = [
        "lora_r",
        "learning_rate",
        "warmup_ratio",
        "datasets",
        "val_set_size",
        "eval_steps",
        "ddp_timeout",
    ]
    for value in (
        "[[1]]",
        "{a: {b: 1}}",
        "nan",
        ".inf",
        "-1",
        '"\\u2028\\x7f"',
        "1e400",
        "[{}]",
        "'auto'",
        "true",
        "~nosuch/x",
        "[{path: x, roles: 3, field: [1], message_field_training: [2], message_property_mappings: "
        "[4]}]",
        "[{path: x, roles: {a: [{}]}, 7: 8, train_on_eos: {}, roles_to_train: {}, type: {field: "
        "{}}}]",
    ):
        rows = [f"{name}: {value}" for name in names]
        (tmp_path / "run.yaml").write_text("\n".join(["adapter: lora", "base_model: x", *rows]))
        assert main([str(tmp_path / "run.yaml"), str(tmp_path / "ours.toml")]) == 0, (
            capsys.readouterr().err
        )
        assert (
            given_flags(TrainConfig, ["--config", str(tmp_path / "ours.toml")], "train.py")[
                "init_from"
            ]
            == "x"
        )


def test_a_package_for_yaml_is_asked_for(tmp_path, capsys, monkeypatch):
    (tmp_path / "run.yaml").write_text("max_steps: 3\n")
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    assert main([str(tmp_path / "run.yaml")]) == 1
    assert "run.yaml, which is YAML, needs the package PyYAML: " in capsys.readouterr().err
    (tmp_path / "run.json").write_text('{"max_steps": 3}')
    monkeypatch.setitem(sys.modules, "yaml", SimpleNamespace())
    assert main([str(tmp_path / "run.json")]) == 0
    assert "max_steps = 3" in capsys.readouterr().out
