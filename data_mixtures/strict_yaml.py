"""Read YAML files that hold one mapping, refusing duplicate keys.

PyYAML keeps the last of two equal keys without a word: a source listed twice in a recipe would silently
lose its first weight. Recipes, catalogue files and experiment files are all read through `read_mapping`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that reports every duplicate key of a mapping, with both line numbers."""


def _construct_unique(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    first_line: dict[Any, int] = {}
    for key_node, _ in node.value:
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
            continue  # a list as key is refused below; what << brings in may be overridden
        key = loader.construct_object(key_node)
        line = key_node.start_mark.line + 1
        if key in first_line:
            raise ValueError(f"duplicate key {key!r} on lines {first_line[key]} and {line}")
        first_line[key] = line
    return loader.construct_mapping(node, deep=True)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_unique)


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping that the YAML file at `path` holds.

    Raises ValueError that names the file when it is missing, not UTF-8, not YAML, not a mapping with string
    keys, or when a key occurs twice at any depth.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 (byte {error.start})") from error
    try:
        content = yaml.load(text, Loader=_UniqueKeyLoader)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ValueError(f"{path}: must hold a mapping with text keys, got {type(content).__name__}")
    return content
