"""schemathesis over our own OpenAPI description: whatever fits it or does not is answered as it says, without 5xx."""

import copy
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import APIOperation, Case, GenerationMode, checks

from tests.server.doubles import FakeEngine, make_app

MODEL = "byte-model"
APP = make_app(FakeEngine(bursts=True, chunks=(1, 3)))
NUM_EXAMPLES = 10
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]


def _description() -> dict:
    """Our own, but that every request names the model that is served: else most are answered with 404."""
    description = copy.deepcopy(APP.openapi())
    for path in description["paths"].values():
        for operation in path.values():
            content = operation.get("requestBody", {}).get("content", {})
            for media in content.values():
                for schema in _alternatives(media["schema"]):
                    if "model" in schema.get("properties", {}):
                        schema["properties"]["model"] = {"enum": [MODEL]}
    return description


def _alternatives(schema: dict) -> list[dict]:
    found = [schema]
    for key in ("anyOf", "oneOf", "allOf"):
        found += [inner for part in schema.get(key, []) for inner in _alternatives(part)]
    return found


def _operations() -> Iterator[APIOperation]:
    schema = schemathesis.openapi.from_dict(_description())
    schema.app = APP
    for result in schema.get_all_operations():
        yield result.ok()


def _has_body(operation: APIOperation) -> bool:
    return operation.method == "post"


OPERATIONS = list(_operations())


@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("operation", [o for o in OPERATIONS if _has_body(o)], ids=lambda operation: operation.label)
def test_bodies_are_answered_as_described(operation: APIOperation, mode: GenerationMode):
    @settings(
        max_examples=NUM_EXAMPLES, phases=[Phase.generate], deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Case) -> None:
        case.validate_response(case.call(), checks=CHECKS)

    check()


@pytest.mark.parametrize(
    "operation", [o for o in OPERATIONS if not _has_body(o)], ids=lambda operation: operation.label
)
def test_other_methods_are_answered_as_described(operation: APIOperation):
    path = {parameter.name: MODEL for parameter in operation.path_parameters}
    for parameters in [path, dict.fromkeys(path, "not/served?")] if path else [{}]:
        case = operation.Case(path_parameters=parameters)
        case.validate_response(case.call(), checks=CHECKS)


def test_every_route_is_described():
    described = {(path, method.upper()) for path, item in APP.openapi()["paths"].items() for method in item}
    assert described >= {("/v1/completions", "POST"), ("/v1/models", "GET"), ("/version", "GET")}
    routers = [route.original_router for route in APP.routes if hasattr(route, "original_router")]
    served = {
        (route.path.replace(":path", ""), method)
        for router in routers
        for route in router.routes
        for method in route.methods
    }
    assert ("/tokenize", "POST") in served
    assert served == described
