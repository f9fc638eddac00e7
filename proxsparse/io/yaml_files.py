"""YAML files of settings, which may be a stranger's: plain values only, read in little time and memory."""

from pathlib import Path

import yaml

from proxsparse.errors import InputError

MOST_BYTES = 1 << 16  # of a file; what a run writes has 2,000
MOST = 2**63  # an integer beyond is no setting; one of some thousand digits cannot even be printed


class PlainLoader(yaml.SafeLoader):
    """YAML without aliases, a few lines of which unfold to billions of values, and with integers of 64 bits."""

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.composer.ComposerError(None, None, f"alias *{event.anchor}: write it out", event.start_mark)
        return super().compose_node(parent, index)

    def whole_number(self, node: yaml.Node) -> int:
        if abs(value := self.construct_yaml_int(node)) >= MOST:
            raise ValueError(f"{node.value:.20}...: a whole number must be below 2^63")
        return value


PlainLoader.add_constructor("tag:yaml.org,2002:int", PlainLoader.whole_number)


def read_yaml(path: Path, what: str) -> dict:
    """The mapping in a YAML file, {} for an empty one.

    Args:
        what: what an error calls the file, such as "--config".
    Raises:
        InputError: it is absent, malformed, too long, or no mapping.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{what} {path}: cannot be read ({error.strerror}); check the path") from error
    if len(text) > MOST_BYTES:
        raise InputError(f"{what} {path}: is longer than {MOST_BYTES:,} bytes: it is no file of settings")
    try:
        settings = yaml.load(text, PlainLoader) or {}
    except Exception as error:  # YAMLError, and whatever Python says of the text behind a tag such as !!int
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{what} {path}: is not YAML ({reason}); mend the file") from error
    if not isinstance(settings, dict):
        raise InputError(f"{what} {path}: must be a mapping of flags to values, such as seq_len: 512")
    return settings
