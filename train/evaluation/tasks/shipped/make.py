"""Write the documents of the shipped tasks: `python -m zslurm.train.evaluation.tasks.shipped.make`.

They are made from what every machine has: numbers, the names of Python's standard library, and short programs.
The same files come out everywhere; a test compares them. `stdlib-text` has no file: it reads the standard library
of the Python that runs, so that its score compares only between models on one version of Python.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

HERE = Path(__file__).parent

_NAMES = {
    "json": "dumps loads JSONDecodeError dump",
    "math": "sqrt floor gcd hypot",
    "os": "listdir environ getpid makedirs",
    "re": "compile findall escape fullmatch",
    "random": "shuffle choice gauss randint",
    "time": "sleep monotonic strftime perf_counter",
    "itertools": "chain islice groupby permutations",
    "functools": "lru_cache partial reduce wraps",
    "collections": "OrderedDict deque Counter namedtuple",
    "shutil": "copyfile rmtree which copytree",
    "threading": "Thread Lock Event Semaphore",
    "socket": "gethostname create_connection AF_INET SOCK_STREAM",
    "pathlib": "Path PurePath PosixPath PurePosixPath",
    "datetime": "timedelta datetime timezone date",
    "subprocess": "Popen check_output CalledProcessError DEVNULL",
    "logging": "getLogger basicConfig StreamHandler WARNING",
}

_PROGRAMS = (
    (
        "add(a, b)",
        "Return the sum of a and b.",
        "return a + b",
        "add(2, 3) == 5 and add(-1, 1) == 0",
    ),
    (
        "double(x)",
        "Return twice x.",
        "return 2 * x",
        "double(4) == 8 and double(0) == 0",
    ),
    (
        "larger(a, b)",
        "Return the larger one of a and b.",
        "return max(a, b)",
        "larger(1, 2) == 2 and larger(5, 3) == 5",
    ),
    (
        "is_even(n)",
        "Return whether n is even.",
        "return n % 2 == 0",
        "is_even(4) and not is_even(7)",
    ),
    (
        "first(items)",
        "Return the first item.",
        "return items[0]",
        "first([3, 1]) == 3 and first('ab') == 'a'",
    ),
    (
        "last(items)",
        "Return the last item.",
        "return items[-1]",
        "last([3, 1]) == 1 and last('ab') == 'b'",
    ),
    (
        "length(items)",
        "Return the number of items.",
        "return len(items)",
        "length([]) == 0 and length('abc') == 3",
    ),
    (
        "backwards(text)",
        "Return the text from its end to its start.",
        "return text[::-1]",
        "backwards('abc') == 'cba'",
    ),
    (
        "total(numbers)",
        "Return the sum of all numbers.",
        "return sum(numbers)",
        "total([1, 2, 3]) == 6 and total([]) == 0",
    ),
    (
        "mean(numbers)",
        "Return the mean of the numbers.",
        "return sum(numbers) / len(numbers)",
        "mean([1, 3]) == 2",
    ),
    (
        "square(x)",
        "Return x times x.",
        "return x * x",
        "square(3) == 9 and square(-2) == 4",
    ),
    (
        "absolute(x)",
        "Return x without its sign.",
        "return abs(x)",
        "absolute(-3) == 3 and absolute(2) == 2",
    ),
    (
        "unique(items)",
        "Return the number of different items.",
        "return len(set(items))",
        "unique([1, 1, 2]) == 2",
    ),
    (
        "upper(text)",
        "Return the text in capitals.",
        "return text.upper()",
        "upper('aB') == 'AB'",
    ),
    (
        "words(text)",
        "Return the words of the text.",
        "return text.split()",
        "words('a b  c') == ['a', 'b', 'c']",
    ),
    (
        "joined(words)",
        "Return the words with spaces between them.",
        "return ' '.join(words)",
        "joined(['a', 'b']) == 'a b'",
    ),
    (
        "power(a, n)",
        "Return a to the power of n.",
        "return a**n",
        "power(2, 5) == 32 and power(7, 0) == 1",
    ),
    (
        "remainder(a, b)",
        "Return the remainder of a divided by b.",
        "return a % b",
        "remainder(7, 3) == 1",
    ),
    (
        "in_order(items)",
        "Return the items in ascending order.",
        "return sorted(items)",
        "in_order([3, 1, 2]) == [1, 2, 3]",
    ),
    (
        "smallest(items)",
        "Return the smallest item.",
        "return min(items)",
        "smallest([3, 1, 2]) == 1",
    ),
    (
        "contains(items, x)",
        "Return whether x is among the items.",
        "return x in items",
        "contains([1, 2], 2) and not contains([], 1)",
    ),
    (
        "count(items, x)",
        "Return how often x is among the items.",
        "return items.count(x)",
        "count([1, 2, 1], 1) == 2",
    ),
    (
        "halves(n)",
        "Return half of n, rounded down.",
        "return n // 2",
        "halves(7) == 3 and halves(8) == 4",
    ),
    (
        "pairs(a, b)",
        "Return a list of pairs of items of a and b.",
        "return list(zip(a, b))",
        "pairs([1], [2]) == [(1, 2)]",
    ),
)
"""Of each function: signature, docstring, a right body, and what is to be true of it."""


def arithmetic() -> Iterator[dict[str, Any]]:
    """Yield sums, differences and products, each with four results to choose from."""
    rng = Random(21)
    for _ in range(240):
        a, b, sign = rng.randint(2, 99), rng.randint(2, 99), rng.choice("+-*")
        if sign == "*":
            a, b = a % 12 + 1, b % 12 + 1
        right = {"+": a + b, "-": a - b, "*": a * b}[sign]
        wrong: list[int] = []
        while len(wrong) < 3:
            near = right + rng.choice([-10, -2, -1, 1, 2, 10])
            if near not in wrong:
                wrong.append(near)
        results = [str(each) for each in rng.sample([right, *wrong], 4)]
        yield {"question": f"{a} {sign} {b} =", "results": results, "answer": results.index(str(right))}


def python_names() -> Iterator[dict[str, Any]]:
    """Yield imports from modules of the standard library, each with four names to choose from."""
    rng = Random(22)
    for module, names in _NAMES.items():
        others = [name for each, those in _NAMES.items() if each != module for name in those.split()]
        for name in names.split():
            choices = rng.sample([name, *rng.sample(others, 3)], 4)
            yield {"module": module, "names": choices, "answer": choices.index(name)}


def python_programs() -> Iterator[dict[str, Any]]:
    """Yield functions to complete, each with a body that is right and a test."""
    for signature, what, body, test in _PROGRAMS:
        prompt = f'def {signature}:\n    """{what}"""\n'
        yield {"prompt": prompt, "body": f"    {body}\n", "test": f"assert {test}\n"}


FILES = {
    "arithmetic.jsonl": arithmetic,
    "python-names.jsonl": python_names,
    "python-programs.jsonl": python_programs,
}


def text_of(name: str) -> str:
    """Return the content of one of the files."""
    return "".join(json.dumps(each) + "\n" for each in FILES[name]())


if __name__ == "__main__":
    for file in FILES:
        (HERE / file).write_text(text_of(file), encoding="utf-8")
