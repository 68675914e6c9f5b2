"""Where the dashboard lies, and which of it holds data. For the check of keys too, so it knows no page and no route."""

DASHBOARD_PATH = "/dashboard"
STATIC_PATH = f"{DASHBOARD_PATH}/static"
DATA_PATH = f"{DASHBOARD_PATH}/data"
PAGES = {  # path -> file
    DASHBOARD_PATH: "index.html",
    f"{DASHBOARD_PATH}/playground": "playground.html",
    f"{DASHBOARD_PATH}/inspector": "inspector.html",
}


def is_page_path(path: str) -> bool:
    """Whether this is a page or what pages are made of: the same for everyone, and open without a key."""
    folder, _, name = path.rpartition("/")
    return (folder == STATIC_PATH and name != "") or path.removesuffix("/") in PAGES


def is_data_path(path: str) -> bool:
    """Whether this may show what others ask of the server."""
    return path.startswith(f"{DATA_PATH}/")
