"""Repositories that Bazel itself asks for, for the Bazel that Debian and Ubuntu package (bazel-bootstrap).

That Bazel has no release number. By default it would download these repositories, some in versions that it cannot
load; what the distribution packages of them, and two stand-ins, let it work without a network.
"""

def _is_debian_bazel():
    version = native.bazel_version or ""
    return version == "" or "ds" in version

def debian_bazel_repositories():
    """Declares the repositories when Bazel is Debian's, and nothing otherwise."""
    if not _is_debian_bazel():
        return
    native.local_repository(
        name = "bazel_skylib",
        path = "/usr/share/bazel/tools/skylib",
    )
    native.local_repository(
        name = "remote_coverage_tools",
        path = "third_party/debian_bazel/remote_coverage_tools",
    )
    native.local_repository(
        name = "rules_cc",
        path = "third_party/debian_bazel/rules_cc",
    )
    native.local_repository(
        name = "rules_java",
        path = "/usr/share/bazel/rules/java",
    )
    native.local_repository(
        name = "rules_proto",
        path = "/usr/share/bazel/rules/proto",
    )
