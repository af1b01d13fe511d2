"""The messages of Envoy's external processing (envoy.service.ext_proc.v3), as far as a picker needs them.

Written down as fields and numbers and turned into classes when this is imported. Fields that are not here are
skipped by protobuf, so that what Envoy adds later does no harm. The sources are Envoy's
`service/ext_proc/v3/external_processor.proto` and `config/core/v3/base.proto`, and gRPC's `health.proto`. The
classes have a package of their own, beside which the generated ones may be loaded in the same process.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory, struct_pb2

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX_STREAMED = range(5)  # how bodies are sent
OVERWRITE = 2  # a header that is there is replaced, or added

_PACKAGE = "pointsman.ext_proc"
_STRUCT, _DURATION = ".google.protobuf.Struct", ".google.protobuf.Duration"
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "bool": _Field.TYPE_BOOL,
    "int": _Field.TYPE_INT32,  # an enumeration travels as its number
}

# By message: name, type and number of its fields. A dot before a type: it is a message; brackets: several.
_MESSAGES: dict[str, tuple[tuple[str, str, int], ...]] = {
    "HeaderValue": (("key", "string", 1), ("value", "string", 2), ("raw_value", "bytes", 3)),
    "HeaderMap": (("headers", "[.HeaderValue]", 1),),
    "HeaderValueOption": (("header", ".HeaderValue", 1), ("append_action", "int", 3)),
    "HeaderMutation": (("set_headers", "[.HeaderValueOption]", 1),),
    "HttpStatus": (("code", "int", 1),),
    "MetadataEntry": (("key", "string", 1), ("value", _STRUCT, 2)),
    "Metadata": (("filter_metadata", "[.MetadataEntry]", 1),),
    # What Envoy says.
    "HttpHeaders": (("headers", ".HeaderMap", 1), ("end_of_stream", "bool", 3)),
    "HttpBody": (("body", "bytes", 1), ("end_of_stream", "bool", 2)),
    "HttpTrailers": (("trailers", ".HeaderMap", 1),),
    "ProtocolConfiguration": (("request_body_mode", "int", 1), ("response_body_mode", "int", 2)),
    "ProcessingRequest": (
        ("request_headers", ".HttpHeaders", 2),
        ("response_headers", ".HttpHeaders", 3),
        ("request_body", ".HttpBody", 4),
        ("response_body", ".HttpBody", 5),
        ("request_trailers", ".HttpTrailers", 6),
        ("response_trailers", ".HttpTrailers", 7),
        ("metadata_context", ".Metadata", 8),
        ("observability_mode", "bool", 10),
        ("protocol_config", ".ProtocolConfiguration", 11),
    ),
    "HealthCheckRequest": (("service", "string", 1),),
    "HealthCheckResponse": (("status", "int", 1),),
    # What a picker answers.
    "StreamedBodyResponse": (("body", "bytes", 1), ("end_of_stream", "bool", 2)),
    "BodyMutation": (("streamed_response", ".StreamedBodyResponse", 3),),
    "CommonResponse": (("header_mutation", ".HeaderMutation", 2), ("body_mutation", ".BodyMutation", 3)),
    "HeadersResponse": (("response", ".CommonResponse", 1),),
    "BodyResponse": (("response", ".CommonResponse", 1),),
    "TrailersResponse": (("header_mutation", ".HeaderMutation", 1),),
    "ImmediateResponse": (
        ("status", ".HttpStatus", 1),
        ("headers", ".HeaderMutation", 2),
        ("body", "bytes", 3),
        ("details", "string", 5),
    ),
    "ProcessingResponse": (
        ("request_headers", ".HeadersResponse", 1),
        ("response_headers", ".HeadersResponse", 2),
        ("request_body", ".BodyResponse", 3),
        ("response_body", ".BodyResponse", 4),
        ("request_trailers", ".TrailersResponse", 5),
        ("response_trailers", ".TrailersResponse", 6),
        ("immediate_response", ".ImmediateResponse", 7),
        ("dynamic_metadata", _STRUCT, 8),
        ("override_message_timeout", _DURATION, 10),
    ),
}


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="pointsman/ext_proc.proto", package=_PACKAGE)
    file.syntax = "proto3"
    file.dependency.extend((struct_pb2.DESCRIPTOR.name, duration_pb2.DESCRIPTOR.name))
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, kind, number in fields:
            field = message.field.add(name=field_name, number=number, label=_Field.LABEL_OPTIONAL)
            if kind.startswith("["):
                field.label, kind = _Field.LABEL_REPEATED, kind[1:-1]
            if kind.startswith("."):
                field.type = _Field.TYPE_MESSAGE
                field.type_name = kind if kind in (_STRUCT, _DURATION) else f".{_PACKAGE}{kind}"
            else:
                field.type = _SCALARS[kind]
    pool = descriptor_pool.Default()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }


_made = _classes()
ProcessingRequest: Any = _made["ProcessingRequest"]
ProcessingResponse: Any = _made["ProcessingResponse"]
HealthCheckRequest: Any = _made["HealthCheckRequest"]
HealthCheckResponse: Any = _made["HealthCheckResponse"]
