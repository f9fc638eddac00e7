"""Untrusted YAML files of flags: only plain values are read, with limits on time and memory."""

from collections import Counter
from pathlib import Path

import yaml

from proxsparse.errors import InputError

MOST_BYTES = 1 << 16  # limit for a file; a run writes about 2,000 bytes
MOST = 2**63  # Python cannot print integers of several thousand digits


class PlainLoader(yaml.SafeLoader):
    """YAML with 64-bit integers, and an error for an alias or a name that is there twice."""

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node:
        if self.check_event(yaml.AliasEvent):  # aliases can expand a few lines to billions of values
            alias = self.get_event()
            where = f"line {alias.start_mark.line + 1}"
            raise ValueError(f"{where}: alias *{alias.anchor:.50} is not allowed; repeat the value")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict:
        mapping = super().construct_mapping(node, deep)
        names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"{twice[0]:.50} is there twice")
        return mapping

    def whole_number(self, node: yaml.Node) -> int | str:
        if ":" in node.value:  # a pattern such as 2:4; YAML reads it to the base 60
            return node.value
        if abs(value := self.construct_yaml_int(node)) >= MOST:
            raise ValueError(f"{node.value:.20}...: an integer must be below 2^63")
        return value


PlainLoader.add_constructor("tag:yaml.org,2002:int", PlainLoader.whole_number)


def read_yaml(path: Path, what: str) -> dict:
    """The mapping in a YAML file; {} for an empty file. `what`: its name in error messages, such as "--config".

    Raises InputError if the file is missing, malformed, too long, or not a mapping.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{what} {path}: cannot be read ({error.strerror}); check the path") from error
    if len(text) > MOST_BYTES:
        raise InputError(f"{what} {path}: longer than {MOST_BYTES:,} bytes; give a YAML file of flags")
    try:
        settings = {} if (found := yaml.load(text, PlainLoader)) is None else found
    except Exception as error:  # YAMLError, RecursionError, or that of the value of a tag such as !!int
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{what} {path}: not valid YAML ({reason}); fix the file") from error
    if not isinstance(settings, dict):
        raise InputError(f"{what} {path}: must be a mapping of flags to values, such as seq_len: 512")
    return settings
