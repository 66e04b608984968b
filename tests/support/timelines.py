"""Reads a trace for Perfetto as Perfetto does: events in the order of time, and a stack of slices on each track."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A slice of a track."""

    track: str
    """Its name; rows of one track have the same."""
    row: int
    name: str
    category: str
    begin: int
    """Nanoseconds since 1970."""
    end: int
    depth: int
    """How many slices of its row are around it."""
    values: dict[str, Any]
    flows: tuple[int, ...]


def packets(data: bytes) -> list[Any]:
    """Return the packets of a file."""
    return list(Trace.FromString(data).packet)


def slices(data: bytes) -> list[Slice]:
    """Return all slices, by their ends. Asserts that each event has a described row, and each slice an end."""
    described = {each.track_descriptor.uuid: each.track_descriptor for each in packets(data)}
    events = [each for each in packets(data) if each.HasField("track_event")]
    stacks: dict[int, list[Any]] = {}
    found = []
    for packet in sorted(events, key=lambda each: each.timestamp):
        row = packet.track_event.track_uuid
        stack = stacks.setdefault(row, [])
        if packet.track_event.type == TrackEvent.TYPE_SLICE_BEGIN:
            stack.append(packet)
            continue
        assert packet.track_event.type == TrackEvent.TYPE_SLICE_END
        begun = stack.pop()
        event = begun.track_event
        found.append(
            Slice(
                track=described[row].name,
                row=row,
                name=event.name,
                category=event.categories[0],
                begin=begun.timestamp,
                end=packet.timestamp,
                depth=len(stack),
                values={each.name: value_of(each) for each in event.debug_annotations},
                flows=tuple(event.flow_ids),
            )
        )
    assert not any(stacks.values())
    return found


def value_of(annotation: Any) -> Any:
    """Return the value of an annotation, also a nested one."""
    if annotation.dict_entries:
        return {each.name: value_of(each) for each in annotation.dict_entries}
    kind = annotation.WhichOneof("value")
    return getattr(annotation, kind) if kind else [value_of(each) for each in annotation.array_values]
