"""device_test, a test whose bodies run on the CPU, and on a GPU as part of //tests:gpu_tests."""

load("@rules_cc//cc:defs.bzl", "cc_library", "cc_test")

def device_test(name, srcs, deps = [], **kwargs):
    """A cc_test of DeviceTest fixtures (device_testing.h), and a library NAME_lib of the same for //tests:gpu_tests.

    Args:
      name: the test's name.
      srcs: its sources.
      deps: libraries; GoogleTest and //runtime:device_testing are added.
      **kwargs: of cc_test, such as size and data.
    """
    cc_library(
        name = name + "_lib",
        testonly = True,
        srcs = srcs,
        visibility = ["//tests:__subpackages__"],
        deps = deps + [
            "//runtime:device_testing",
            "@com_google_googletest//:gtest",
        ],
        alwayslink = True,
    )
    cc_test(
        name = name,
        deps = [
            ":" + name + "_lib",
            "@com_google_googletest//:gtest_main",
        ],
        **kwargs
    )
