"""Describes a body that is read by hand, for `/docs` and `/openapi.json`."""

from typing import Any

from server.protocol.fields import RequestFields


def body_of(request_type: type[RequestFields]) -> dict[str, Any]:
    """An `openapi_extra` with the schema of `request_type`, nested types written out where they are used."""
    schema = request_type.model_json_schema()
    definitions = schema.pop("$defs", {})
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _write_out(schema, definitions)}},
        }
    }


def _write_out(node: Any, definitions: dict[str, Any]) -> Any:  # noqa: ANN401
    if isinstance(node, dict):
        if "$ref" in node:
            return _write_out(definitions[node["$ref"].rpartition("/")[2]], definitions)
        return {key: _write_out(value, definitions) for key, value in node.items()}
    if isinstance(node, list):
        return [_write_out(item, definitions) for item in node]
    return node
