"""Counts the test cases of one `bazel test` from its build events, and prints `N passed, N failed, N skipped`.

    bazel test --build_event_json_file=events.json //...
    python3 count_test_cases.py events.json $?

The cases are those in the test.xml of every test that the invocation ran or took from the cache. A test target that did
not build, crashed, ran out of time or left no readable test.xml is at least one failed case. A disabled case counts as
skipped. The exit status is 0 if nothing failed and Bazel's own status was 0.
"""

import collections
import json
import sys
import urllib.parse
import xml.etree.ElementTree as ElementTree

NO_TESTS_FOUND = 4  # Bazel's exit status

Counts = collections.namedtuple("Counts", "passed skipped failed_names")


def count_xml(path):
    """Reads one test.xml. Raises OSError or ElementTree.ParseError."""
    passed, skipped, failed_names = 0, 0, []
    for case in ElementTree.parse(path).iter("testcase"):
        name = ".".join(filter(None, [case.get("classname"), case.get("name")]))
        if case.find("failure") is not None or case.find("error") is not None:
            failed_names.append(name)
        elif case.find("skipped") is not None or case.get("status") == "notrun":
            skipped += 1
        else:
            passed += 1
    return Counts(passed, skipped, failed_names)


def count_result(label, result):
    """Counts one run of one test: a testResult event's payload."""
    status = result.get("status", "NO_STATUS")
    uris = [output.get("uri", "") for output in result.get("testActionOutput", []) if output.get("name") == "test.xml"]
    try:
        counts = count_xml(urllib.parse.unquote(urllib.parse.urlparse(uris[0]).path))
    except IndexError:
        return Counts(0, 0, ["%s (%s, no test.xml)" % (label, status.lower())])
    except (OSError, ElementTree.ParseError) as error:
        return Counts(0, 0, ["%s (%s, %s)" % (label, status.lower(), error)])
    failed_names = ["%s %s" % (label, name) for name in counts.failed_names]
    if status != "PASSED" and not failed_names:
        failed_names = ["%s (%s)" % (label, status.lower())]
    return Counts(counts.passed, counts.skipped, failed_names)


def read_events(path):
    """Yields the events; an interrupted Bazel may leave the last line incomplete."""
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                try:
                    yield json.loads(line)
                except ValueError:
                    return
    except OSError:
        return


def count_events(path):
    tests = set()  # labels of every test target of the invocation
    results = {}  # (label, run, shard) -> (attempt, payload); a later attempt replaces an earlier one
    for event in read_events(path):
        event_id = event.get("id", {})
        if "targetConfigured" in event_id and "testSize" in event.get("configured", {}):
            tests.add(event_id["targetConfigured"]["label"])
        elif "testResult" in event_id and "testResult" in event:
            run = event_id["testResult"]
            key = (run["label"], run.get("run", 1), run.get("shard", 1))
            attempt = run.get("attempt", 1)
            if key not in results or results[key][0] < attempt:
                results[key] = (attempt, event["testResult"])
    counts = [count_result(key[0], payload) for key, (_, payload) in sorted(results.items(), key=lambda item: item[0])]
    without_result = sorted(tests - {key[0] for key in results})
    return Counts(
        sum(count.passed for count in counts),
        sum(count.skipped for count in counts),
        [name for count in counts for name in count.failed_names] + ["%s (did not build or run)" % name for name in without_result],
    )


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    bazel_status = int(sys.argv[2])
    passed, skipped, failed_names = count_events(sys.argv[1])
    if bazel_status == NO_TESTS_FOUND:
        print("no tests found")
    elif bazel_status != 0 and not failed_names:
        failed_names = ["the build (bazel ended with status %d)" % bazel_status]
    for name in failed_names:
        print("failed: " + name)
    print("%d passed, %d failed, %d skipped" % (passed, len(failed_names), skipped))
    sys.exit(bazel_status or (1 if failed_names else 0))


if __name__ == "__main__":
    main()
