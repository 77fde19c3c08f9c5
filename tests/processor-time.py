#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Is the processor time of `make test` what it was?

processor-time.py BUDGET PACES MEASURED <TOOK: lines "PHASE SECONDS" on standard
input, held to those of BUDGET; MEASURED becomes what this run makes of BUDGET.
PACES has the time of one fixed piece of work, taken now and then meanwhile: on a
slow machine, or beside others, all takes longer by that much. Wall time says
nothing: others may use the machine. Phases that compile are judged in an empty
clone, and apart from those that test.

Half more than the budget is a failure, a tenth more is said.
"""

import statistics
import sys

FAILS_AT = 1.5
SAYS_AT = 1.1


def pairs(lines):
    lines = (line.split("#")[0].split() for line in lines)
    return {line[0]: int(line[1]) for line in lines if line}


def judged(what, took, budget):
    """A sentence, and whether it is a failure; None: nothing has grown."""
    spent, allowed = sum(took.values()), sum(budget.values())
    print(f"make test: processor time of {what}: {spent:.0f} s at this pace, {allowed} s are known")
    if spent <= SAYS_AT * allowed:
        return None
    grown = {name: took[name] - budget[name] for name in took}
    most = [name for name in sorted(grown, key=grown.get, reverse=True)[:3] if grown[name] > 1]
    most = [f"{name} {budget[name]} -> {took[name]:.0f} s" for name in most]
    return (
        f"the processor time of {what} has grown: {', '.join(most)}."
        " Make it less, or say why it is more (tests/processor-time.txt)",
        spent > FAILS_AT * allowed,
    )


def main():
    _, budget_path, paces_path, measured_path = sys.argv
    with open(budget_path, encoding="utf-8") as lines:
        text = lines.readlines()
    budget = pairs(text)
    known_pace = budget.pop("pace")
    with open(paces_path, encoding="utf-8") as lines:
        pace = statistics.median(int(line) for line in lines)
    took = pairs(sys.stdin)
    unknown = sorted(took.keys() - budget.keys())
    if unknown:
        return f"{budget_path} has no line for {', '.join(unknown)}"

    def some(is_test, of):
        return {name: of[name] for name in took if name.startswith("test-") == is_test}

    # In a clone that was built before there is little to compile.
    compiled = some(False, took)
    is_empty = sum(compiled.values()) > sum(some(False, budget).values()) / 2
    with open(measured_path, "w", encoding="utf-8") as lines:
        if not is_empty:
            print("# Not of an empty clone: no new budget.", file=lines)
        lines.writelines(line for line in text if line.startswith("#"))
        print("pace", round(pace), file=lines)
        for name in budget:
            print(name, took.get(name, budget[name]), file=lines)
    at_pace = {name: seconds * known_pace / pace for name, seconds in took.items()}
    found = [judged("the tests", some(True, at_pace), some(True, budget))]
    if is_empty:
        found.append(judged("compiling", some(False, at_pace), some(False, budget)))
    for sentence, is_failure in filter(None, found):
        if is_failure:
            return f"make test: FAILED: {sentence}"
        print(f"make test: WARNING: {sentence}")
    return None


if __name__ == "__main__":
    sys.exit(main())
