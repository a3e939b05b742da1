"""The CUDA toolkit as a repository, or an empty one of the same shape on a machine without it.

CUDA_HOME says where the toolkit is (default /usr/local/cuda). DSV4_NO_CUDA=1 builds as if there were none.
"""

_MINIMUM_MAJOR = 12  # the first toolkit that knows compute_90a

_BUILD_WITH_CUDA = """package(default_visibility = ["//visibility:public"])

cc_library(
    name = "headers",
    hdrs = glob(["include/*.h", "include/*.hpp", "include/crt/**"]),
    defines = ["DSV4_HAVE_CUDA=1"],
    includes = ["include"],
)

cc_library(
    name = "cudart",
    linkopts = ["-L{lib}", "-l:libcudart_static.a", "-ldl", "-lrt", "-pthread"],
    deps = [":headers"],
)

cc_library(
    name = "cublas",
    linkopts = ["-L{lib}", "-lcublas", "-Wl,-rpath,{lib}"],
    deps = [":cublaslt", ":headers"],
)

cc_library(
    name = "cublaslt",
    linkopts = ["-L{lib}", "-lcublasLt", "-Wl,-rpath,{lib}"],
    deps = [":headers"],
)
"""

_BUILD_WITHOUT_CUDA = """package(default_visibility = ["//visibility:public"])

cc_library(name = "headers")

cc_library(name = "cudart")

cc_library(name = "cublas")

cc_library(name = "cublaslt")
"""

_DEFS = """# Generated: what the machine has.
HAVE_CUDA = {have}
NVCC = {nvcc}
NVCC_VERSION = {version}
"""

def _warn(text):
    # buildifier: disable=print
    print("building without CUDA: " + text)

def _find_toolkit(ctx):
    """Returns (path, nvcc version), or None."""
    if ctx.os.environ.get("DSV4_NO_CUDA", "") not in ["", "0"]:
        return None
    asked = ctx.os.environ.get("CUDA_HOME", "")
    home = asked or "/usr/local/cuda"
    nvcc = ctx.path(home + "/bin/nvcc")
    if not nvcc.exists:
        if asked:
            _warn("CUDA_HOME is %s, and bin/nvcc is not there" % asked)
        return None
    result = ctx.execute([nvcc, "--version"])
    words = result.stdout.split("release ")
    version = words[1].split(",")[0] if result.return_code == 0 and len(words) == 2 else ""
    major = version.split(".")[0]
    if not major.isdigit() or int(major) < _MINIMUM_MAJOR:
        _warn("%s reports version '%s', at least %d is needed" % (nvcc, version, _MINIMUM_MAJOR))
        return None
    return home, version

def _library_dir(ctx, home):
    for name in ["lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"]:
        if ctx.path("%s/%s/libcudart_static.a" % (home, name)).exists:
            return "%s/%s" % (home, name)
    return None

def _cuda_repository_impl(ctx):
    toolkit = _find_toolkit(ctx)
    lib = _library_dir(ctx, toolkit[0]) if toolkit else None
    if toolkit and not lib:
        _warn("libcudart_static.a is not under " + toolkit[0])
        toolkit = None
    ctx.file("WORKSPACE", "workspace(name = %r)\n" % ctx.name)
    if toolkit:
        home, version = toolkit
        ctx.symlink(home + "/include", "include")
        ctx.file("BUILD", _BUILD_WITH_CUDA.format(lib = lib))
        ctx.file("defs.bzl", _DEFS.format(have = True, nvcc = repr(home + "/bin/nvcc"), version = repr(version)))
    else:
        ctx.file("BUILD", _BUILD_WITHOUT_CUDA)
        ctx.file("defs.bzl", _DEFS.format(have = False, nvcc = repr(""), version = repr("")))

cuda_repository = repository_rule(
    implementation = _cuda_repository_impl,
    environ = [
        "CUDA_HOME",
        "DSV4_NO_CUDA",
    ],
    local = True,
)
