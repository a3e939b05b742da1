"""Libraries of the machine (Debian and Ubuntu packages) as Bazel repositories.

Headers are those on the compiler's own search path, so they are system headers (no warnings from them) and need no
entry in a sandbox. Archives are named with `-l:`, which the compiler resolves in its own library folders, whatever the
architecture calls them. A target depends on the label of each library that it includes, as with the sources' own BUILD
files, though only the union is linked.
"""

_ABSL_LIBRARIES = [
    "algorithm_container",
    "any_invocable",
    "base",
    "bits",
    "btree",
    "cleanup",
    "core_headers",
    "fixed_array",
    "flags",
    "flags_parse",
    "flags_reflection",
    "flags_usage",
    "flat_hash_map",
    "flat_hash_set",
    "function_ref",
    "hash",
    "inlined_vector",
    "int128",
    "memory",
    "node_hash_map",
    "optional",
    "random",
    "span",
    "status",
    "statusor",
    "str_format",
    "strings",
    "synchronization",
    "time",
    "variant",
]

def _library_dirs(ctx):
    """The compiler's folders for system libraries, most specific first."""
    dirs = []
    compiler = ctx.which("g++") or ctx.which("c++") or ctx.which("clang++")
    if compiler:
        result = ctx.execute([compiler, "-print-multiarch"])
        triple = result.stdout.strip()
        if result.return_code == 0 and triple:
            dirs.append("/usr/lib/" + triple)
    return dirs + ["/usr/lib64", "/usr/lib"]

def _archives(ctx, prefix, package):
    """Names of the static libraries that start with prefix."""
    for path in _library_dirs(ctx):
        folder = ctx.path(path)
        if not folder.exists:
            continue
        found = sorted([
            entry.basename
            for entry in folder.readdir()
            if entry.basename.startswith(prefix) and entry.basename.endswith(".a")
        ])
        if found:
            return found
    fail("%s*.a is missing: sudo apt-get install %s" % (prefix, package))

def _require_header(ctx, header, package):
    if not ctx.path(header).exists:
        fail("%s is missing: sudo apt-get install %s" % (header, package))

def _library(name, linkopts = [], deps = []):
    return "cc_library(name = %r, linkopts = %r, deps = %r)\n" % (name, linkopts, deps)

def _write_build(ctx, targets):
    ctx.file("WORKSPACE", "workspace(name = %r)\n" % ctx.name)
    ctx.file("BUILD", "package(default_visibility = [\"//visibility:public\"])\n\n" + "".join(targets))

def _absl_impl(ctx):
    archives = ["-l:" + name for name in _archives(ctx, "libabsl_", "libabsl-dev")]

    # The archives refer to each other in an order that changes with the version.
    targets = [_library("absl", ["-Wl,--start-group"] + archives + ["-Wl,--end-group", "-pthread"])]
    for name in _ABSL_LIBRARIES:
        targets.append(_library(name, deps = [":absl"]))
    _write_build(ctx, targets)

def _googletest_impl(ctx):
    _archives(ctx, "libgtest", "libgtest-dev")
    _archives(ctx, "libgmock", "libgmock-dev")
    _write_build(ctx, [
        _library("gtest", ["-l:libgmock.a", "-l:libgtest.a", "-pthread"]),
        _library("gtest_main", ["-l:libgmock_main.a"], [":gtest"]),
    ])

def _benchmark_impl(ctx):
    _require_header(ctx, "/usr/include/benchmark/benchmark.h", "libbenchmark-dev")

    # Debian ships no static libbenchmark. A copy of the shared one next to the binary is found wherever it is carried.
    _write_build(ctx, [
        _library("benchmark", ["-lbenchmark", "-Wl,-rpath,$$ORIGIN", "-pthread"]),
        _library("benchmark_main", ["-l:libbenchmark_main.a"], [":benchmark"]),
    ])

def _json_impl(ctx):
    _require_header(ctx, "/usr/include/nlohmann/json.hpp", "nlohmann-json3-dev")
    _write_build(ctx, [_library("json")])

def _eigen_impl(ctx):
    _require_header(ctx, "/usr/include/eigen3/Eigen/Core", "libeigen3-dev")
    ctx.symlink("/usr/include/eigen3/Eigen", "include/Eigen")
    _write_build(ctx, ["""cc_library(
    name = "eigen",
    hdrs = glob(["include/Eigen/**"]),
    includes = ["include"],
)
"""])

_absl_repository = repository_rule(implementation = _absl_impl, local = True)
_benchmark_repository = repository_rule(implementation = _benchmark_impl, local = True)
_eigen_repository = repository_rule(implementation = _eigen_impl, local = True)
_googletest_repository = repository_rule(implementation = _googletest_impl, local = True)
_json_repository = repository_rule(implementation = _json_impl, local = True)

def system_repositories():
    """Declares the repositories; each looks at the machine when a target of it is first needed."""
    _absl_repository(name = "com_google_absl")
    _googletest_repository(name = "com_google_googletest")
    _eigen_repository(name = "eigen")
    _benchmark_repository(name = "google_benchmark")
    _json_repository(name = "nlohmann_json")
