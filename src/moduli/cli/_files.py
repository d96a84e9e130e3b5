"""`moduli inspect`, `moduli diff` and `moduli merge`."""

import ast
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from ._complete import RECIPES, complete_recipe, list_recipes
from ._console import exit_with_usage, open_errors, open_output, print_json


def inspect(
    file: Annotated[
        Path, Argument(exists=True, metavar="FILE", help="A checkpoint, a safetensors file, or one of torch.save.")
    ],
    verify: Annotated[bool, Option(help="Compare every tensor with its checksum.")] = False,
    history: Annotated[
        bool, Option("--history", help="The edits of the model only: their numbers, when, where and what.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """What a checkpoint holds: tensors with the values of small ones, labels, versions. Nothing in the file is run."""
    from .. import io

    sharded = file.is_dir() or file.suffix == ".json"
    paths = [each.path for each in io.TensorFiles(file).files] if sharded else [file]
    descriptions = [io.inspect(path, verify=verify) for path in paths]
    if history:
        edits = [each for description in descriptions for each in description.as_dict()["edits"]]
        if as_json:
            print_json({"path": str(file), "edits": edits})
        else:
            for each in descriptions:
                open_output().print("\n".join(map(io.escape, str(each.edits).splitlines())), markup=False)
        return
    if as_json:
        whole = {"path": str(file), "files": [each.as_dict() for each in descriptions]}
        print_json(whole if sharded else {**descriptions[0].as_dict(), "parameters": descriptions[0].parameters})
        return
    if sharded:
        open_output().print(
            io.escape(f"{file}: {len(io.TensorFiles(file)):,} tensors in {len(descriptions)} files"), markup=False
        )
    for each in descriptions:
        open_output().print(str(each), markup=False)


def diff(
    left: Annotated[Path, Argument(exists=True, metavar="LEFT", help="A checkpoint: a file, a directory, an index.")],
    right: Annotated[Path, Argument(exists=True, metavar="RIGHT", help="Another one.")],
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """What is different in two checkpoints: names, shapes, dtypes, labels, and how far values are apart."""
    from .. import io

    differences = io.diff(left, right)
    if as_json:
        print_json({"left": str(left), "right": str(right), **differences.as_dict()})
    else:
        open_output().print("\n".join(map(io.escape, str(differences).splitlines())), markup=False)


def merge(
    recipe: Annotated[
        str,
        Argument(
            metavar="RECIPE",
            help=f"How: {', '.join(RECIPES)}; or FILE.yml of mergekit.",
            autocompletion=complete_recipe,
        ),
    ],
    files: Annotated[
        list[Path] | None,
        Argument(exists=True, metavar="CHECKPOINT", help="Files, directories, adapters; a base comes first."),
    ] = None,
    output: Annotated[
        Path | None, Option("--out", "-o", metavar="PLACE", help="The file or the directory to write.")
    ] = None,
    option: Annotated[
        list[str] | None,
        Option("--set", "-s", metavar="NAME=VALUE", help="t=0.3, weights=[2,1], t=layers.0-15:0.3,*:0.5"),
    ] = None,
    base: Annotated[Path | None, Option(metavar="PLACE", help="What LoRA adapters are applied to.")] = None,
    shard_size: Annotated[str | None, Option(metavar="SIZE", help="Shards of at most 5GB, 500MiB, ...")] = None,
    align: Annotated[bool, Option("--align", help="Put units into the order of the first model's.")] = False,
    module: Annotated[
        str | None, Option(metavar="FILE.py:NAME", help="For --align: a function that builds the module; it is run.")
    ] = None,
    example: Annotated[
        str | None, Option(metavar="EXAMPLE", help="For --align: its input, torch.zeros(1, 784) or a file.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make one model of several, tensor by tensor, without holding a whole model in memory.

    \b
    moduli merge lerp a.safetensors b.safetensors -o c.safetensors --set t=0.3
    moduli merge ties base/ math/ code/ -o merged/ --set density=0.2 --shard-size 5GB
    moduli merge task_arithmetic base/ adapter/ -o merged/
    moduli merge recipe.yml -o merged/
    moduli merge lerp a.safetensors b.safetensors -o c.safetensors --set t=0.5 \\
        --align --module net.py:make --example "torch.zeros(1, 784)"
    """  # noqa: D301 - a mark for the help, which keeps these lines as they are
    from .. import io

    is_file = _is_recipe_file(recipe)
    if output is None:
        exit_with_usage("where to? Give the file or the directory to write with --out")
    models = files or []
    if output.exists() and any(map(output.samefile, models)):
        exit_with_usage(f"{output} is one of the models, and would be overwritten; give another place with --out")
    if is_file and (models or not Path(recipe).exists()):
        exit_with_usage(f"{recipe} names its models itself: it is a file, and there are no others")
    size = _parse_size(shard_size)
    options: dict[str, Any] = dict(map(_parse_option, option or []))
    if base is not None:
        options["base"] = base
    if align or module or example:
        options["align"] = _trace(align, module, example)
    if is_file:
        recipe = io.merge_recipe(recipe, output, shard_size=size, **options).recipe
    else:
        io.merge_files(recipe, models, output, shard_size=size, **options)
    _print_summary(output, recipe, as_json)


def _is_recipe_file(recipe: str) -> bool:
    """Return whether a recipe is a file of mergekit; exit if it is neither a file nor the name of a recipe."""
    if Path(recipe).suffix in (".yml", ".yaml"):
        return True
    if recipe not in (recipes := list_recipes()):
        exit_with_usage(f"{recipe!r} is not a recipe; choose from {', '.join(recipes)}, or give a FILE.yml")
    return False


def _print_summary(output: Path, recipe: str, as_json: bool) -> None:
    """Print the sizes of a merged model: a line, or JSON with the recipe."""
    from .. import io

    tensors = io.TensorFiles(output)
    count = sum(tensors.meta(name).numel() for name in tensors)
    if as_json:
        summary = {"path": str(output), "recipe": recipe, "files": len(tensors.files), "tensors": len(tensors)}
        print_json({**summary, "parameters": count})
    else:
        suffix = "" if len(tensors.files) == 1 else f", in {len(tensors.files)} files"
        open_errors().print(io.escape(f"{output}: {count:,} numbers in {len(tensors)} tensors{suffix}"), markup=False)


def _parse_size(text: str | None) -> int | None:
    """Return the size of a shard in bytes; None without a text."""
    from .. import io

    try:
        return None if text is None else io.parse_size(text)
    except ValueError as error:
        exit_with_usage(f"--shard-size: {error}")


def _trace(align: bool, module: str | None, example: str | None) -> Any:
    """Return the axes of the module that a function in a file builds.

    Args:
        align: Whether the command has --align, without which it exits.
        module: The function that builds the module.
        example: The input of the module.
    """
    from .. import axes, lab
    from ._example import ExampleError, read_example

    if not (align and module and example):
        exit_with_usage("--align needs --module FILE.py:NAME, which builds the module, and --example, its input")
    parts = lab.split_reference(module)
    if parts is None:
        exit_with_usage(f"--module {module}: write FILE.py:NAME, a function without arguments that returns the module")
    try:
        arguments = read_example(example)
    except ExampleError as error:
        exit_with_usage(f"--example {error}")
    return axes.trace(lab.load_object(*parts)(), *arguments)


def _parse_option(text: str) -> tuple[str, Any]:
    """Parse `name=value`, the value written as in Python or as numbers by layer, and return both; nothing is run."""
    from ..merge import MergeError, layered

    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        exit_with_usage(f"--set {text}: write it as t=0.3 or weights=[2, 1]")
    try:
        if ":" in value and not set(value) & set("'\"[]("):
            return name, layered(value)
        return name, ast.literal_eval(value)
    except (MergeError, ValueError, SyntaxError, RecursionError) as error:
        fact = error if isinstance(error, MergeError) else f"{value} is no number"
        exit_with_usage(f"--set {text}: {fact}; write it as t=0.3, or in quotes if it is a word: then='ties'")
