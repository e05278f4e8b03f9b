// SPDX-License-Identifier: Apache-2.0

// Command testlog reads the output of `go test -json` and prints it like go test without -json. It
// exits with 1 if a test failed, if none ran, or if a test skipped for a reason other than those
// named by -allow. A test may skip only with a message beginning "need: REASON". On a complete
// machine (CI, as root) a skip for lack of root or of a tool is a failure.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
)

func main() {
	allow := flag.String("allow", "kernel", "comma-separated permitted reasons for skips")
	flag.Parse()
	report := newReport(os.Stdout, strings.Split(*allow, ","))
	if err := report.read(os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "testlog:", err)
		os.Exit(1)
	}
	if !report.finish() {
		os.Exit(1)
	}
}

// event is a line of test2json (go doc test2json), including the go command's build events (go help
// buildjson).
type event struct {
	Action  string
	Package string
	Test    string
	Output  string
}

type test struct{ pkg, name string }

type skip struct {
	test
	reason string
}

type report struct {
	out            io.Writer
	allow          []string
	output         map[test][]string // of running tests
	passed, failed int
	brokenPackages int // packages failed without a failed test: build errors, panics in init
	skips          []skip
}

func newReport(out io.Writer, allow []string) *report {
	return &report{out: out, allow: allow, output: map[test][]string{}}
}

// read consumes a whole stream. Other lines, such as output of make, pass through.
func (r *report) read(in io.Reader) error {
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if !bytes.HasPrefix(line, []byte("{")) || json.Unmarshal(line, &e) != nil || e.Action == "" {
				r.out.Write(line)
			} else {
				r.add(e)
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("reading test output: %w", err)
		}
	}
}

func (r *report) add(e event) {
	t := test{e.Package, e.Test}
	switch e.Action {
	case "output":
		if benchmark.MatchString(e.Output) { // attributed to the previous test
			io.WriteString(r.out, e.Output)
		} else if e.Test != "" {
			r.output[t] = append(r.output[t], e.Output)
		} else if e.Output != "PASS\n" { // go test prints "ok" instead
			io.WriteString(r.out, e.Output)
		}
	case "build-output":
		io.WriteString(r.out, e.Output)
	case "pass", "fail", "skip":
		if e.Test == "" {
			r.endPackage(e)
		} else {
			r.endTest(t, e.Action)
		}
	}
}

func (r *report) endTest(t test, action string) {
	output := r.output[t]
	delete(r.output, t)
	switch action {
	case "pass":
		r.passed++
	case "skip":
		r.skips = append(r.skips, skip{t, skipReason(output)})
	case "fail":
		r.failed++
		r.print(output)
	}
}

// endPackage counts a package failed without a failed test: it does not build, or one of its tests
// never ended.
func (r *report) endPackage(e event) {
	unended := r.showUnended(e.Package)
	if e.Action == "fail" && (unended || r.failed == 0) {
		r.brokenPackages++
	}
}

// showUnended prints the output of a package's unfinished tests. The package panicked or timed out
// in one of them.
func (r *report) showUnended(pkg string) bool {
	found := false
	for t, output := range r.output {
		if t.pkg == pkg {
			delete(r.output, t)
			r.print(output)
			found = true
		}
	}
	return found
}

var benchmark = regexp.MustCompile(`^Benchmark\S+\s+\d+\s.* ns/op`)

var framing = regexp.MustCompile(`^=== (RUN|PAUSE|CONT|NAME) `)

func (r *report) print(output []string) {
	for _, line := range output {
		if !framing.MatchString(line) {
			io.WriteString(r.out, line)
		}
	}
}

var message = regexp.MustCompile(`^\s+\S+\.go:\d+: (.*)`)

// skipReason returns the text passed to Skip: the last message before the end of the test.
func skipReason(output []string) string {
	for _, line := range slices.Backward(output) {
		if m := message.FindStringSubmatch(line); m != nil {
			return m[1]
		}
	}
	return "no reason given"
}

func (r *report) allowed(reason string) bool {
	return slices.ContainsFunc(r.allow, func(allow string) bool {
		rest, ok := strings.CutPrefix(reason, "need: "+allow)
		return ok && (rest == "" || strings.ContainsAny(rest[:1], " :,."))
	})
}

// finish prints the skips and the counts. It reports success.
func (r *report) finish() bool {
	for t := range r.output { // the stream ended early
		if r.showUnended(t.pkg) {
			r.brokenPackages++
		}
	}
	ok := r.failed == 0 && r.brokenPackages == 0
	for _, s := range r.skips {
		verdict := "skipped"
		if !r.allowed(s.reason) {
			verdict, ok = "FAIL: must not skip", false
		}
		fmt.Fprintf(r.out, "%s: %s %s: %s\n", verdict, s.pkg, s.name, s.reason)
	}
	if r.passed+r.failed+len(r.skips) == 0 {
		fmt.Fprintln(r.out, "FAIL: no test ran")
		ok = false
	}
	fmt.Fprintf(r.out, "%d passed, %d failed, %d skipped\n", r.passed, r.failed+r.brokenPackages, len(r.skips))
	return ok
}
