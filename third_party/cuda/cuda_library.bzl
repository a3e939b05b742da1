"""cuda_library, a cc_library whose sources nvcc compiles, cuda_binary and if_cuda."""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")
load("@cuda//:defs.bzl", "HAVE_CUDA", "NVCC", "NVCC_VERSION")

_NVCC_FLAGS = [
    "-std=c++20",
    "-O2",
    "-lineinfo",
    "--expt-relaxed-constexpr",
    "-Werror=all-warnings",
    "-Xcompiler=-fPIC",
]

_ArchsInfo = provider(fields = ["archs"])

def _cuda_archs_impl(ctx):
    archs = [arch.strip() for arch in ctx.build_setting_value.split(",") if arch.strip()]
    if not archs:
        fail("%s: name at least one architecture, such as 90a" % ctx.label)
    return _ArchsInfo(archs = archs)

cuda_archs = rule(
    implementation = _cuda_archs_impl,
    build_setting = config.string(flag = True),
    doc = "A comma-separated list of compute capabilities, such as 90a,100a.",
)

def if_cuda(then, otherwise = []):
    """Returns `then` where the machine has CUDA and `otherwise` elsewhere."""
    return then if HAVE_CUDA else otherwise

def _host_flags(ctx):
    """The command line's C++ flags (warnings, sanitizers) for the host half of a .cu file."""
    flags = ctx.fragments.cpp.copts + ctx.fragments.cpp.cxxopts
    return ["-Xcompiler=" + flag for flag in flags if not flag.startswith("-std=") and not flag.startswith("-O")]

def _cuda_library_impl(ctx):
    cc_toolchain = find_cpp_toolchain(ctx)
    feature_configuration = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = cc_toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )

    deps = [dep[CcInfo] for dep in ctx.attr.deps + [ctx.attr._cudart]]
    own = CcInfo(compilation_context = cc_common.create_compilation_context(
        defines = depset(ctx.attr.defines + ["DSV4_HAVE_CUDA=1"]),
        headers = depset(ctx.files.hdrs),
    ))
    context = cc_common.merge_cc_infos(cc_infos = [own] + deps).compilation_context

    args = ctx.actions.args()
    args.add("-ccbin", cc_toolchain.compiler_executable)
    for arch in ctx.attr._archs[_ArchsInfo].archs:
        args.add("-gencode=arch=compute_{0},code=sm_{0}".format(arch))
    args.add_all(_NVCC_FLAGS)
    args.add_all(_host_flags(ctx))
    args.add_all(context.defines, before_each = "-D")
    args.add_all(
        depset([".", ctx.genfiles_dir.path, ctx.bin_dir.path], transitive = [context.quote_includes, context.includes]),
        before_each = "-I",
    )
    args.add_all(context.system_includes, before_each = "-isystem")
    args.add_all(ctx.attr.copts)

    objects = []
    for src in ctx.files.srcs:
        if src.extension != "cu":
            continue
        path = src.short_path.replace("../", "").replace(ctx.label.package + "/", "")
        object = ctx.actions.declare_file("_objs/%s/%s.o" % (ctx.label.name, path[:-len(".cu")]))
        objects.append(object)
        compile = ctx.actions.args()
        compile.add("-c", src)
        compile.add("-o", object)
        ctx.actions.run(
            executable = NVCC,
            arguments = [args, compile],
            inputs = depset(ctx.files.srcs, transitive = [context.headers, cc_toolchain.all_files]),
            outputs = [object],
            env = {"DSV4_NVCC_VERSION": NVCC_VERSION},  # part of the action's key: a new toolkit compiles anew
            use_default_shell_env = True,
            mnemonic = "CudaCompile",
            progress_message = "Compiling %s with nvcc" % src.short_path,
        )

    linking_context, _ = cc_common.create_linking_context_from_compilation_outputs(
        name = ctx.label.name,
        actions = ctx.actions,
        alwayslink = ctx.attr.alwayslink,
        cc_toolchain = cc_toolchain,
        compilation_outputs = cc_common.create_compilation_outputs(
            objects = depset(objects),
            pic_objects = depset(objects),
        ),
        disallow_dynamic_library = True,
        feature_configuration = feature_configuration,
        linking_contexts = [dep.linking_context for dep in deps],
    )
    return [
        DefaultInfo(files = depset(objects)),
        CcInfo(compilation_context = context, linking_context = linking_context),
    ]

_cuda_library = rule(
    implementation = _cuda_library_impl,
    attrs = {
        "alwayslink": attr.bool(),
        "copts": attr.string_list(),
        "defines": attr.string_list(),
        "deps": attr.label_list(providers = [CcInfo]),
        "hdrs": attr.label_list(allow_files = [".h", ".cuh"]),
        "srcs": attr.label_list(allow_files = [".cu", ".cuh", ".h"]),
        "_archs": attr.label(default = "//third_party/cuda:archs"),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
        "_cudart": attr.label(default = "@cuda//:cudart"),
    },
    fragments = ["cpp"],
    provides = [CcInfo],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)

def cuda_library(name, srcs = [], hdrs = [], deps = [], copts = [], defines = [], alwayslink = False, **kwargs):
    """A library whose .cu sources nvcc compiles, for C++ targets to depend on.

    Dependants get the macro DSV4_HAVE_CUDA=1. On a machine without CUDA this is a cc_library of the same headers and
    deps, without sources and without the macro.

    Args:
      name: the target's name.
      srcs: .cu files, each compiled alone (no relocatable device code), and private .h and .cuh files.
      hdrs: public .h and .cuh files.
      deps: C++ or CUDA libraries; their headers and macros reach nvcc too.
      copts: further flags for nvcc, such as --fmad=false; flags for the host compiler as -Xcompiler=-flag.
      defines: macros for this target and its dependants.
      alwayslink: keep every object, even one that nothing refers to.
      **kwargs: visibility, tags, testonly.
    """
    if HAVE_CUDA:
        _cuda_library(
            name = name,
            srcs = srcs,
            hdrs = hdrs,
            alwayslink = alwayslink,
            copts = copts,
            defines = defines,
            deps = deps,
            **kwargs
        )
    else:
        native.cc_library(
            name = name,
            hdrs = hdrs,
            defines = defines,
            deps = deps,
            **kwargs
        )

def cuda_binary(name, srcs, deps = [], **kwargs):
    """A cc_binary that needs CUDA to be built; on a machine without it, a program that says so.

    Args:
      name: the target's name.
      srcs: C++ sources.
      deps: C++ or CUDA libraries.
      **kwargs: of cc_binary.
    """
    native.cc_binary(
        name = name,
        srcs = if_cuda(srcs, ["//third_party/cuda:no_cuda_main.cc"]),
        deps = if_cuda(deps),
        **kwargs
    )
