"""`penstock admins` as a user runs it."""

import json
import re
from pathlib import Path

from tests.cli.test_tenants import answer, complaint, home, run

__all__ = ["home"]  # a fixture

KEY = re.compile(r"psa_[0-9A-Za-z]{10}_[0-9A-Za-z]{32}\n")


def test_an_admins_life(home: Path) -> None:
    out, err = run("admins", "add", "root")
    assert KEY.fullmatch(out)
    assert "cannot be shown again" in err
    secret = out.strip().rpartition("_")[2]
    shown = answer("admins", "list") + answer("admins", "list", "--json")
    assert secret not in shown + err
    assert re.search(r"^root +psa_\w{10} .* active$", shown, re.MULTILINE)
    assert "'root' already" in complaint("admins", "add", "root")
    assert f"revoked {out[:14]} of admin root" in run("admins", "revoke", out[:14])[1]
    assert json.loads(answer("admins", "list", "--json"))[0]["revoked_at"] is not None
    assert "no admin" in complaint("admins", "revoke", "nobody")
    assert all(secret.encode() not in file.read_bytes() for file in home.iterdir())
