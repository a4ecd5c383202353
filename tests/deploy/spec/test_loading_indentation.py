from __future__ import annotations

import textwrap

import pytest
import yaml

from kvroute.deploy.spec.loading import fix_layout
from kvroute.deploy.spec.source import dotted

PROPER = """\
    apiVersion: inference.sagemaker.aws.amazon.com/v1
    kind: InferenceEndpointConfig
    metadata:
      name: demo
    spec:
      # how many
      replicas: 2
      intelligentRoutingSpec:
        enabled: true
        autoScalingSpec:
          maxReplicaCount: 2
      autoScalingSpec:
        maxReplicaCount: 5
      worker:
        args:
          - --model
          - |
            several
              lines
        resources:
          limits: {
            cpu: 1,
            memory: 2 }
          requests:
            image: 1
        image: x
        environmentVariables:
          - name: A
            value: "1"
          - name: B
            valueFrom:
              secretKeyRef:
                name: s
                key: k
      kubernetes:
        volumes:
          - name: v
            hostPath:
              path: /v
    x-kvroute:
      lmcache:
        mode: mp
"""


def test_a_properly_written_spec_is_left_as_it_is():
    text = textwrap.dedent(PROPER)
    layout = fix_layout(text)

    assert layout.text == text
    assert layout.is_complete
    assert not layout.has_no_indentation
    assert not [line for line in layout.placed if line.is_misplaced or line.duplicate_of]


def test_lists_at_the_indentation_of_their_key_are_as_good():
    text = "spec:\n  worker:\n    args:\n    - a\n    image: x\n"
    layout = fix_layout(text)

    assert not [line for line in layout.placed if line.is_misplaced]
    assert yaml.safe_load(layout.text) == yaml.safe_load(text)


def test_a_pasted_spec_without_indentation_gets_it_back(sample):
    layout = fix_layout(sample)

    assert layout.has_no_indentation
    assert layout.is_complete
    fixed = yaml.safe_load(layout.text)
    assert fixed["metadata"] == {"name": "${NAME}", "namespace": "${NAMESPACE}"}
    assert fixed["spec"]["modelSourceConfig"] == {
        "modelSourceType": "s3",
        "s3Storage": {"bucketName": "${S3_BUCKET}", "region": "${AWS_REGION}"},
        "modelLocation": "${S3_MODEL_PATH}",
        "prefetchEnabled": False,
    }
    assert fixed["spec"]["kvCacheSpec"]["l2CacheSpec"] == {"l2CacheBackend": "tieredstorage"}
    assert fixed["spec"]["worker"]["resources"] == {
        "limits": {"nvidia.com/gpu": "4"},
        "requests": {"cpu": "6", "memory": "30Gi", "nvidia.com/gpu": "4"},
    }
    assert fixed["spec"]["worker"]["args"][4:] == ["--tensor-parallel-size", "4"]
    assert fixed["spec"]["worker"]["modelVolumeMount"] == {
        "name": "model-weights",
        "mountPath": "/opt/ml/model",
    }
    assert len(fixed["spec"]["worker"]["environmentVariables"]) == 5


def test_comments_stay_with_their_lines_and_commented_fields_with_their_siblings(sample):
    lines = fix_layout(sample).text.splitlines()

    place = lines.index('      l2CacheBackend: "tieredstorage" # can also be "redis"')
    assert lines[place + 1] == '      # Set l2CacheLocalUrl if selecting "redis"'
    assert lines[place + 2].startswith("      # l2CacheLocalUrl:")


def test_laying_out_twice_changes_nothing(sample):
    once = fix_layout(sample).text

    assert fix_layout(once).text == once


@pytest.mark.parametrize("indent", [4, 8])
def test_a_wider_indentation_is_understood(indent, sample):
    proper = fix_layout(sample).text
    wide = "\n".join(
        " " * (indent * ((len(line) - len(line.lstrip())) // 2)) + line.lstrip()
        for line in proper.splitlines()
    )

    layout = fix_layout(wide)

    assert layout.text == proper
    assert not [line for line in layout.placed if line.is_misplaced]


def test_a_field_of_an_outer_parent_written_too_deep_is_moved_out():
    source = "  modelSourceConfig:\n    s3Storage:\n      region: r\n      modelLocation: m\n"
    text = f"spec:\n{source}  replicas: 1\n"
    layout = fix_layout(text)

    assert yaml.safe_load(layout.text)["spec"] == {
        "modelSourceConfig": {"s3Storage": {"region": "r"}, "modelLocation": "m"},
        "replicas": 1,
    }
    assert [dotted(line.path) for line in layout.placed if line.is_misplaced] == [
        "spec.modelSourceConfig.modelLocation"
    ]


def test_tabs_count_as_two_blanks():
    assert fix_layout("spec:\n\treplicas: 1\n").text == "spec:\n  replicas: 1\n"


def test_a_line_without_a_place_is_kept_and_reported():
    layout = fix_layout("spec:\n  nonsense: 1\n  replicas: 1\njust words\n- item\n")

    assert [line.number for line in layout.placed if not line.is_known] == [2, 4, 5]
    assert not layout.is_complete
    assert "nonsense: 1" in layout.text


def test_a_duplicate_field_is_reported_with_the_line_of_the_first():
    layout = fix_layout("spec:\n  replicas: 1\n  replicas: 2\n")

    assert [(line.number, line.duplicate_of) for line in layout.placed if line.duplicate_of] == [(3, 2)]


def test_document_marks_and_lists_within_lists_survive():
    text = textwrap.dedent(
        """\
        ---
        spec:
          kubernetes:
            initContainers:
              - name: a
                command: [sh, -c]
                env:
                  - name: A
                    value: b
        """
    )

    assert fix_layout(text).text == text
