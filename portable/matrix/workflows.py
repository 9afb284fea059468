"""GitHub Actions from a matrix: one workflow of the hosted lanes, and one that puts the devices' lanes behind them.

Pull requests run the hosted lanes only, those of forks included: the workflow that names one's own runners has no
trigger that a fork can cause. Every job may read the repository and nothing else, and every action is a commit.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from portable.matrix.lanes import SELF_HOSTED, Lane, Matrix
from portable.matrix.report import GATE

HOSTED, DEVICES = "ci.yml", "devices.yml"
FOLDER = ".github/workflows"
LINT = ".github/actionlint.yaml"
HEAD = "# Written by `portable matrix --write` from {source}; edit that file instead.\n"
OUT = "lane"  # the folder of a lane's results, below the checkout
Node = dict[str, Any]


def workflows(matrix: Matrix, source: str) -> dict[str, str]:
    """File name -> text; `source` is the TOML file as the first line names it."""
    made = {HOSTED: hosted(matrix, source)}
    if any(not lane.hosted for lane in matrix.lanes):
        made[DEVICES] = devices(matrix, source)
    return {name: HEAD.format(source=source) + text(node, matrix) for name, node in made.items()}


def files(matrix: Matrix, source: str) -> dict[str, str]:
    """Path -> text of all that is written: the workflows, and actionlint's list of one's own runners' labels."""
    made = {f"{FOLDER}/{name}": each for name, each in workflows(matrix, source).items()}
    labels = {label for lane in matrix.lanes if not lane.hosted for label in lane.runner} - {SELF_HOSTED}
    if labels:
        made[LINT] = HEAD.format(source=source) + text({"self-hosted-runner": {"labels": sorted(labels)}}, matrix)
    return made


def hosted(matrix: Matrix, source: str) -> Node:
    """Every lane that needs no runner of one's own; the first one gates the others."""
    lanes = [lane for lane in matrix.lanes if lane.hosted]
    jobs = {lane.name: job(matrix, lane, needs=[lanes[0].name] if lane is not lanes[0] else []) for lane in lanes}
    jobs["report"] = report(matrix, source, list(jobs), partial=True)
    pull = "github.event_name == 'pull_request'"
    on: Node = {"pull_request": {}, "merge_group": {}, "workflow_call": {}}
    if len(lanes) == len(matrix.lanes):  # else the other workflow calls this one
        on["push"] = {"branches": [matrix.workflow.branch]}
    return {
        "name": "ci",
        "on": on,
        "permissions": {"contents": "read"},
        "concurrency": {
            "group": "ci-${{ github.event_name }}-${{ github.ref }}",
            "cancel-in-progress": f"${{{{ {pull} }}}}",
        },
        "jobs": jobs,
    }


def devices(matrix: Matrix, source: str) -> Node:
    """The lanes with devices, in their order, behind all hosted ones; a lane without a runner stays off."""
    flow = matrix.workflow
    jobs: dict[str, Node] = {GATE: {"uses": f"./{FOLDER}/{HOSTED}", "permissions": {"contents": "read"}}}
    for lane in matrix.lanes:
        if not lane.hosted:
            there = f"contains(fromJSON(vars.{flow.variable} || '[]'), '{lane.name}')"
            made = job(matrix, lane, needs=[GATE])
            jobs[lane.name] = {"if": f"${{{{ {there} && github.event_name != 'pull_request' }}}}", **made}
    jobs["report"] = report(matrix, source, list(jobs), partial=False)
    return {
        "name": "devices",
        "on": {"push": {"branches": [flow.branch]}, "schedule": [{"cron": flow.schedule}], "workflow_dispatch": {}},
        "permissions": {"contents": "read"},
        "concurrency": {"group": "devices-${{ github.ref }}", "cancel-in-progress": False},
        "jobs": jobs,
    }


def job(matrix: Matrix, lane: Lane, needs: list[str]) -> Node:
    """One lane: set up, each command (all of them run, whatever failed), and its results kept."""
    flow = matrix.workflow
    made: Node = {"name": lane.title}
    if needs:
        made["needs"] = needs
    labels = list(lane.runner or flow.runner)
    made |= {"runs-on": labels if len(labels) > 1 else labels[0], "timeout-minutes": lane.minutes}
    if not lane.required:
        made["continue-on-error"] = True
    if lane.image:
        made["container"] = {"image": lane.image, "options": matrix.options[lane.vendor]}
    made["env"] = {"OMP_NUM_THREADS": "1", "OUT": OUT}
    made["defaults"] = {"run": {"shell": "bash"}}
    doctor = "portable doctor\n"
    if lane.devices:  # a runner with the wrong label would prove something else
        arch = f"portable.detect({lane.device!r}).arch"
        doctor += f'python -c "import portable; assert {arch} in {list(lane.archs)}, {arch}"\n'
    steps = [*start(matrix, lane), {"name": "device", "run": doctor}]
    steps += [
        {"name": command.split(" && ")[0][:60].rstrip(), "if": "${{ !cancelled() }}", "run": command}
        for command in lane.run
    ]
    steps.append(
        {
            "if": "${{ always() }}",
            "uses": action(matrix, "upload"),
            "with": {"name": f"lane-{lane.name}", "path": OUT, "if-no-files-found": "ignore"},
        }
    )
    return {**made, "steps": steps}


def start(matrix: Matrix, lane: Lane | None = None) -> list[Node]:
    """The checkout and its environment. An image brings its own Python and torch; elsewhere both are the matrix's."""
    steps: list[Node] = [{"uses": action(matrix, "checkout"), "with": {"persist-credentials": False}}]
    flow, set_up = matrix.workflow, ""
    if lane is None or not lane.image:
        steps.append({"uses": action(matrix, "python"), "with": {"python-version": flow.python}})
        torch, triton = (lane and lane.torch) or flow.torch, (lane and lane.triton) or flow.triton
        set_up = f"sed -i -e 's/^torch==.*/torch=={torch}/' -e 's/^triton==.*/triton=={triton}/' ci/constraints.txt\n"
    set_up += f'. ci/setup.sh\nmkdir -p {OUT}\necho "$PWD/.venv/bin" >>"$GITHUB_PATH"\n'
    return [*steps, {"name": "set-up", "run": set_up}]


def report(matrix: Matrix, source: str, needs: list[str], partial: bool) -> Node:
    """The lanes' results as one, which fails where something was skipped everywhere or is proved nowhere."""
    merge = f'portable matrix --file {source} --merge lanes --jobs "$JOBS" --json report.json'
    merge += ' --markdown "$GITHUB_STEP_SUMMARY"' + (" --partial" if partial else "")
    step = {"name": "merge", "env": {"JOBS": "${{ toJSON(needs) }}"}, "run": merge}
    return {
        "name": "Report",
        "needs": needs,
        "if": "${{ !cancelled() }}",
        "runs-on": matrix.workflow.runner[0],
        "timeout-minutes": 20,
        "defaults": {"run": {"shell": "bash"}},
        "steps": [
            *start(matrix),
            {"uses": action(matrix, "download"), "with": {"path": "lanes", "pattern": "lane-*"}},
            step,
            {
                "if": "${{ always() }}",
                "uses": action(matrix, "upload"),
                "with": {"name": "report-partial" if partial else "report", "path": "report.json"},
            },
        ],
    }


def action(matrix: Matrix, name: str) -> str:
    return f"{matrix.actions[name].uses}@{matrix.actions[name].sha}"


def text(node: Node, matrix: Matrix) -> str:
    """A workflow as YAML; behind each commit stands its version, which tools that renew pins read and write."""
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise ValueError("writing workflows needs PyYAML; install portable-attention[matrix]") from None

    class Dumper(yaml.SafeDumper):  # type: ignore[misc, name-defined]
        def ignore_aliases(self, data: object) -> bool:
            return True

    def string(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, string)
    written: str = yaml.dump(node, Dumper=Dumper, sort_keys=False, width=1000, allow_unicode=True)
    written = re.sub(r"^(\s*)'on':", r"\1on:", written, flags=re.MULTILINE)  # a word of GitHub's, not YAML 1.1's true
    versions = {each.sha: each.version for each in matrix.actions.values()}
    return re.sub(r"@([0-9a-f]{40})$", lambda pin: f"{pin[0]} # {versions[pin[1]]}", written, flags=re.MULTILINE)


def drift(matrix: Matrix, source: str, root: Path) -> list[str]:
    """How the workflows below `root` differ from what the matrix makes, a sentence each."""
    wanted = files(matrix, source)
    found = []
    for name, made in wanted.items():
        path = root / name
        if not path.exists():
            found.append(f"{name} is not there")
        elif path.read_text(encoding="utf-8") != made:
            found.append(f"{name} is not what {source} makes")
    for path in sorted(path for folder in (FOLDER, ".github") for path in (root / folder).glob("*.y*ml")):
        name = path.relative_to(root).as_posix()
        if name not in wanted and path.read_text(encoding="utf-8").startswith(HEAD.partition("{")[0]):
            found.append(f"{name} is of no lane any more")
    return found
