"""Programs that know nothing of proxsparse open packed folders through the entry point: transformers serve, lm_eval."""

import json
import os
import re
import socket
import subprocess
import sys
import time

import pytest
from task_files import needs_lm_eval

from proxsparse.models.loading import load_model

pytestmark = pytest.mark.slow
TASK = """
task: colours
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{rows}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{answers}}}}"
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc}}, {{metric: brier_score}}]
"""


@needs_lm_eval
def test_lm_eval_gives_the_scores_of_the_dense_model(folders, tmp_path):
    answers = [" red", " blue", " a deep green", " none of these"]
    rows = [{"question": f"Colour {n}?", "answers": answers, "label": n % 4} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "colours.yaml").write_text(TASK.format(rows=tmp_path / "rows.jsonl"))
    scores = []
    for folder in folders:
        out = tmp_path / folder.name
        flags = {"model": "hf", "model_args": f"pretrained={folder},dtype=float32", "tasks": "colours", "device": "cpu"}
        flags |= {"include_path": tmp_path, "output_path": out, "batch_size": "4"}
        command = [sys.executable, "-m", "lm_eval", *(f"--{name}={value}" for name, value in flags.items())]
        offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
        done = subprocess.run(command, cwd=tmp_path, env=offline, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (result,) = out.rglob("results_*.json")
        scores.append(json.loads(result.read_text())["results"]["colours"])
    dense, packed = ({key: value for key, value in score.items() if isinstance(value, float)} for score in scores)
    assert {"acc,none", "brier_score,none"} <= dense.keys()
    assert packed == pytest.approx(dense, rel=1e-5)


def test_transformers_serve_loads_a_packed_folder(folders, tmp_path):
    openai = pytest.importorskip("openai")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    nothing_there = dict.fromkeys(("HTTPS_PROXY", "HTTP_PROXY"), "http://127.0.0.1:9")  # as without a network
    environment = os.environ | nothing_there | {"HF_HOME": str(tmp_path / "hub"), "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folders[1]), "--port", str(port)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*command, "--host", "127.0.0.1"], cwd="/", env=environment, stdout=log, stderr=log)
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0, timeout=60)
        end = time.monotonic() + 180
        while "Uvicorn running" not in (printed := (tmp_path / "log").read_text()):
            assert process.poll() is None, printed
            assert time.monotonic() < end, printed
            time.sleep(0.1)
        settings = {"model": str(folders[1]), "prompt": "hello", "max_tokens": 8, "temperature": 0}
        answer = client.completions.create(**settings).choices[0].text
    finally:
        process.kill()
        process.wait()
    model, tokenizer = load_model(str(folders[0]))
    ids = tokenizer("hello", return_tensors="pt")
    expected = model.generate(**ids, max_new_tokens=8, do_sample=False)[0, 5:]
    assert answer == tokenizer.decode(expected, skip_special_tokens=True)
    assert not re.search("Traceback|newly initialized|pypi", printed)  # nor does the look for updates print an error
