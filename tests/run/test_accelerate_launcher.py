"""``accelerate launch`` before a script: memfit runs what Accelerate's own launcher would start."""

import ast
import json
import os

import pytest

from memfit.errors import UnsuitableEnvironmentError, UsageError
from memfit.run.accelerate_launcher import ask_accelerate
from memfit.run.launchers import launched_script
from support.new_processes import run_python

pytestmark = pytest.mark.process
pytest.importorskip("accelerate")

FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_activation_checkpointing: true
  fsdp_version: 2
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 29500
mixed_precision: bf16
num_machines: 2
num_processes: 16
rdzv_backend: static
same_network: true
"""
OLDER = "distributed_type: MULTI_GPU\nfp16: true\nnum_processes: 4\n"
"""Without the keys that later versions of Accelerate write."""
FILES = {"fsdp.yaml": FSDP, "older.yaml": OLDER, "bad.yaml": "a: [1\nb: 2\n", "empty.yaml": ""}
ASK_ALL = """
import contextlib, json, os, sys
from accelerate.commands import launch
from memfit.run.accelerate_launcher import _answer
for asked in json.loads(sys.argv[1]):
    sys.stdout.flush()
    if os.fork() == 0:
        with contextlib.redirect_stdout(sys.stderr):
            answer = _answer(**asked)
        print(json.dumps(answer))
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""
CASES = {
    "x.py --lr 1": (1, 1, 0, {"ACCELERATE_MIXED_PRECISION": "no"}),
    "--num-processes 8 x.py": (8, 1, 0, {}),
    "--num_processes 1 --mixed_precision=bf16 x.py": (1, 1, 0, {"ACCELERATE_MIXED_PRECISION": "bf16"}),
    "--multi_gpu --num_processes 16 --num_machines 2 x.py": (8, 2, 0, {}),
    "--use_fsdp --num_processes 2 --fsdp_sharding_strategy SHARD_GRAD_OP x.py": (
        *(2, 1, 0),
        {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"},
    ),
    "--config_file fsdp.yaml x.py": (
        *(8, 2, 1),
        {"FSDP_VERSION": "2", "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block", "ACCELERATE_MIXED_PRECISION": "bf16"},
    ),
    "--config_file older.yaml x.py": (4, 1, 0, {"ACCELERATE_MIXED_PRECISION": "fp16"}),
    "--config_file older.yaml --num_processes 2 --gpu_ids 2,3 x.py": (
        *(2, 1, 0),
        {"CUDA_VISIBLE_DEVICES": "2,3"},
    ),
    "--num_processes 2 --dynamo_backend inductor x.py": (2, 1, 0, {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}),
    "--use_deepspeed --zero_stage 3 --gradient_accumulation_steps 4 --num_processes 2 x.py": (
        *(2, 1, 0),
        {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        },
    ),
    "--use_deepspeed --deepspeed_config_file ds.json --num_machines 2 --num_processes 16 x.py": (
        *(8, 2, 0),
        {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"},
    ),
    "--cpu x.py": (1, 1, 0, {"ACCELERATE_USE_CPU": "True"}),
}
REFUSED = {
    "": "the following arguments are required: training_script",
    "--help": "the script is missing",
    "--bogus 3 x.py": "unrecognized arguments: --bogus",
    "--multi_gpu --num_processes 1 x.py": "at least 2 processes",
    "--tpu x.py": "cannot stand in for its tpu launcher",
    "--no_python x.sh": "cannot stand in for --no_python",
    "--config_file nowhere.yaml x.py": "The passed configuration file `nowhere.yaml` does not exist",
    "--config_file bad.yaml x.py": 'in "bad.yaml", line 2',
    "--config_file empty.yaml x.py": "(Accelerate has read empty.yaml.)",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What Accelerate answers to each command line, from forks of one process."""
    folder = tmp_path_factory.mktemp("files")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    asked = [{"options": typed.split(), "nproc": 1, "nnodes": 1} for typed in (*CASES, *REFUSED)]
    done = run_python("-c", ASK_ALL, json.dumps(asked), cwd=folder, HF_HOME=str(folder))
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, done.stdout.splitlines())
    return dict(zip((*CASES, *REFUSED), lines, strict=True))


@pytest.mark.parametrize("typed", CASES)
def test_accelerates_own_rules_say_what_runs(answers, typed):
    nproc, nnodes, machine, variables = CASES[typed]
    found = answers[typed]
    assert (found["nproc"], found["nnodes"], found["machine"]) == (nproc, nnodes, machine)
    assert variables.items() <= found["environment"].items()
    assert found["command"] == ["x.py", *typed.partition("x.py")[2].split()]


@pytest.mark.parametrize("typed", REFUSED)
def test_what_accelerate_does_not_start_is_refused_in_its_own_words(answers, typed):
    assert REFUSED[typed] in answers[typed]["refused"]


@pytest.mark.slow
def test_a_file_that_accelerate_config_wrote_is_read_by_default(tmp_path):
    (tmp_path / "accelerate").mkdir()
    default = tmp_path / "accelerate/default_config.yaml"
    default.write_text(OLDER)

    def ask(options, **size):
        return ask_accelerate(
            "accelerate launch", options.split(), os.environ | {"HF_HOME": str(tmp_path)}, **size
        )

    assert ask("-m pkg.train --lr 1", nproc=1, nnodes=1)["nproc"] == 4
    asked_for = ask("-m pkg.train --lr 1", nproc=8, nnodes=2)  # wins, as on Accelerate's command line
    assert (asked_for["nproc"], asked_for["nnodes"], asked_for["module"]) == (8, 2, True)
    assert asked_for["command"] == ["pkg.train", "--lr", "1"]
    default.write_text("distributed_type: NONSENSE\n")
    with pytest.raises(
        UsageError, match=r"accelerate launch: 'NONSENSE'.*Accelerate has read .*default_config"
    ):
        ask("x.py", nproc=1, nnodes=1)


def test_without_accelerate_the_error_says_what_to_install(tmp_path):
    (tmp_path / "accelerate.py").write_text("raise ImportError('not here')\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    with pytest.raises(
        UnsuitableEnvironmentError, match=r"\(not here\). Install it with pip install accelerate"
    ):
        ask_accelerate("accelerate launch", ["x.py"], environment, nproc=1, nnodes=1)


def test_only_the_launch_of_a_script_asks_accelerate():
    said = []
    launched_script(["accelerate", "env"], module=False, on_wait=said.append)
    launched_script(["torchrun", "x.py"], module=False, on_wait=said.append)
    assert not said
    found = launched_script(["accelerate-launch", "--use_fsdp", "x.py"], module=False, on_wait=said.append)
    assert said == ["accelerate-launch: Accelerate reads its options"]
    assert {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "ACCELERATE_USE_FSDP": "true",
    }.items() <= found.environment.items()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", ["--config_file fsdp.yaml --num_machines 1 --num_processes 2", "--multi_gpu --num_processes 2"]
)
def test_the_script_sees_the_environment_that_accelerate_launch_gives_it(options, tmp_path):
    (tmp_path / "fsdp.yaml").write_text(FSDP.replace("machine_rank: 1", "machine_rank: 0"))
    (tmp_path / "x.py").write_text(
        "import os, sys\nif os.environ['RANK'] == '1':\n    print(dict(os.environ))\n"
    )
    launch = ("launch", *options.split(), "x.py")
    real = run_python("-m", "accelerate.commands.accelerate_cli", *launch, cwd=tmp_path)
    ours = run_python("-m", "memfit", "dry-run", "--rank", "1", "accelerate", *launch, cwd=tmp_path)

    def variables(done):
        found = ast.literal_eval(next(line for line in done.stdout.splitlines() if line.startswith("{")))
        kinds = ("ACCELERATE", "FSDP", "LOCAL", "OMP", "RANK", "WORLD")
        return {name: value for name, value in found.items() if name.startswith(kinds)}

    assert variables(ours) == variables(real), (ours.stderr, real.stderr)
