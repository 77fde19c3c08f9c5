#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Is the processor time of `make test` what it was?

processor-time.py BUDGET PACES MEASURED <TOOK: lines "PHASE SECONDS" on standard
input, held to those of BUDGET; MEASURED becomes what this run makes of BUDGET.
PACES has the time of one fixed piece of work, taken now and then meanwhile: on a
slow machine, or beside others, all takes longer by that much. Wall time says
nothing: others may use the machine.

Half more than the budget is a failure, a tenth more is said.
"""

import statistics
import sys

FAILS_AT = 1.5
SAYS_AT = 1.1


def pairs(lines):
    lines = (line.split("#")[0].split() for line in lines)
    return {line[0]: int(line[1]) for line in lines if line}


def main():
    _, budget_path, paces_path, measured_path = sys.argv
    with open(budget_path, encoding="utf-8") as lines:
        budget = pairs(lines)
    with open(paces_path, encoding="utf-8") as lines:
        pace = statistics.median(int(line) for line in lines)
    took = pairs(sys.stdin)
    # What the budget is after this run.
    with open(measured_path, "w", encoding="utf-8") as lines:
        print("pace", round(pace), file=lines)
        for name in budget:
            if name in took:
                print(name, took[name], file=lines)
    unknown = sorted(took.keys() - budget.keys())
    if unknown:
        return f"{budget_path} has no line for {', '.join(unknown)}"
    slower = pace / budget.pop("pace")
    allowed = sum(budget.values())
    spent = sum(took.values()) / slower
    print(
        f"make test: processor time {sum(took.values())} s on a machine that is {slower:.2f} times"
        f" as slow as that of {budget_path}: {spent:.0f} s there, {allowed} s are known"
    )
    if spent <= SAYS_AT * allowed:
        return None
    grown = {name: took[name] / slower - budget[name] for name in took}
    most = [name for name in sorted(grown, key=grown.get, reverse=True)[:3] if grown[name] > 1]
    most = [f"{name} {budget[name]} -> {budget[name] + grown[name]:.0f} s" for name in most]
    said = (
        f"the processor time has grown: {', '.join(most)}."
        f" Make it less, or say why it is more ({budget_path})"
    )
    if spent > FAILS_AT * allowed:
        return f"make test: FAILED: {said}"
    print(f"make test: WARNING: {said}")
    return None


if __name__ == "__main__":
    sys.exit(main())
