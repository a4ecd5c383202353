"""Each unusable certificate or key file is an error that names the option and the file."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import ValidationError
from tests.support.certificates import Authority, private_bytes

from kvroute.tls import (
    ClientTlsOptions,
    ServerTlsOptions,
    TlsFileError,
    client_context,
    expiry,
    server_context,
    signatures,
)


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def error_of(**files) -> TlsFileError:
    with pytest.raises(TlsFileError) as caught:
        server_context(ServerTlsOptions(**files), "server.tls")
    return caught.value


def test_a_context_accepts_tls_1_2_and_newer_only(authority):
    pair = authority.issue("a")
    context = server_context(ServerTlsOptions(cert_file=pair.cert, key_file=pair.key), "server.tls")

    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert context.verify_mode is ssl.CERT_NONE


def test_an_authority_for_clients_makes_their_certificates_required(authority):
    pair = authority.issue("a")
    options = ServerTlsOptions(cert_file=pair.cert, key_file=pair.key, client_ca_file=authority.file)

    assert server_context(options, "server.tls").verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize("option", ["cert_file", "key_file", "client_ca_file"])
@pytest.mark.parametrize("fault", ["missing", "folder", "no PEM", "damaged"])
def test_an_unusable_file_is_named_with_its_option(authority, tmp_path, option, fault):
    pair = authority.issue("a")
    files = {"cert_file": pair.cert, "key_file": pair.key, "client_ca_file": authority.file}
    bad = files[option] = tmp_path / "bad.pem"
    if fault == "folder":
        bad.mkdir()
    elif fault == "no PEM":
        bad.write_text("hello")
    elif fault == "damaged":
        mark = "PRIVATE KEY" if option == "key_file" else "CERTIFICATE"
        bad.write_text(f"-----BEGIN {mark}-----\nAAAA\n-----END {mark}-----\n")

    error = error_of(**files)

    assert str(bad) in str(error)
    if (
        fault != "damaged" or option == "client_ca_file"
    ):  # OpenSSL does not say which file of a pair is damaged
        assert error.path == f"server.tls.{option}"


def test_a_key_of_another_certificate_is_refused(authority):
    one, other = authority.issue("one"), authority.issue("other")

    error = error_of(cert_file=one.cert, key_file=other.key)

    assert error.path == "server.tls.key_file"
    assert "is not the key of the certificate" in str(error)


def test_an_encrypted_key_is_refused_without_a_question_on_the_terminal(authority, tmp_path):
    file = tmp_path / "encrypted.key"
    file.write_bytes(private_bytes(ec.generate_private_key(ec.SECP256R1()), b"secret"))

    error = error_of(cert_file=authority.issue("a").cert, key_file=file)

    assert str(error) == f"server.tls.key_file: {file}: the key is encrypted"


@pytest.mark.parametrize("alone", ["cert_file", "key_file", "client_ca_file"])
def test_a_file_without_its_partner_is_refused(alone):
    with pytest.raises(ValidationError, match="cert_file"):
        ServerTlsOptions.model_validate({alone: "x.pem"})


def test_a_replaced_file_has_another_signature(tmp_path):
    file = tmp_path / "a"
    assert signatures((file,)) == (None,)
    file.write_text("one")
    before = signatures((file,))
    new = tmp_path / "b"
    new.write_text("two")
    new.replace(file)

    assert signatures((file,)) != before


def test_a_clients_own_authority_replaces_the_default_list(authority):
    options = ClientTlsOptions(ca_file=authority.file)

    context = client_context(options, "upstream.tls", ssl.create_default_context)

    assert [dict(each["subject"][0])["commonName"] for each in context.get_ca_certs()] == ["authority"]
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname


@pytest.mark.parametrize("option", ["ca_file", "cert_file", "key_file"])
def test_an_unusable_file_of_a_client_is_named_with_its_option(authority, tmp_path, option):
    pair = authority.issue("a")
    files = {"ca_file": authority.file, "cert_file": pair.cert, "key_file": pair.key}
    missing = files[option] = tmp_path / "missing.pem"

    with pytest.raises(TlsFileError) as caught:
        client_context(ClientTlsOptions(**files), "upstream.tls", ssl.create_default_context)

    assert str(caught.value) == f"upstream.tls.{option}: cannot read {missing}: No such file or directory"


@pytest.mark.parametrize("year", [2001, 2031, 2049, 2050, 2099, 9999])
def test_a_certificates_expiry_is_read(authority, year):
    until = datetime(year, 12, 31, 23, 59, 59, tzinfo=UTC)

    assert expiry(authority.issue("a", until=until).cert, "o") == until.timestamp()


def test_of_a_chain_the_first_expiry_counts(authority, tmp_path):
    first, later = datetime(2031, 1, 1, tzinfo=UTC), datetime(2032, 1, 1, tzinfo=UTC)
    chain = tmp_path / "chain.pem"
    parts = [authority.issue(str(each), until=each).cert.read_text() for each in (later, first)]
    chain.write_text("Bag Attributes: M\u00fcller\n".join(["", *parts]))

    assert expiry(chain, "o") == first.timestamp()


@pytest.mark.parametrize("body", ["", "AAAA", "MIIB", "MAA="])
def test_a_certificate_that_cannot_be_decoded_is_an_error_with_its_option(tmp_path, body):
    file = tmp_path / "bad.pem"
    file.write_text(f"-----BEGIN CERTIFICATE-----\n{body}\n-----END CERTIFICATE-----\n")

    with pytest.raises(TlsFileError, match=r"^o: .*bad\.pem has a certificate that cannot be decoded"):
        expiry(file, "o")
