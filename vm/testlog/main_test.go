// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
)

func TestReport(t *testing.T) {
	run := func(lines ...string) string { return strings.Join(lines, "\n") + "\n" }
	pass := run(
		`make: entering`,
		`{"Action":"run","Package":"p","Test":"TestA"}`,
		`{"Action":"output","Package":"p","Test":"TestA","Output":"=== RUN   TestA\n"}`,
		`{"Action":"output","Package":"p","Test":"TestA","Output":"    a_test.go:1: noise\n"}`,
		`{"Action":"pass","Package":"p","Test":"TestA"}`,
		`{"Action":"output","Package":"p","Output":"PASS\n"}`,
		`{"Action":"output","Package":"p","Output":"ok  \tp\t0.1s\n"}`,
		`{"Action":"pass","Package":"p"}`)
	skipped := func(reason string) string {
		return pass + run(
			`{"Action":"output","Package":"p","Test":"TestS","Output":"=== RUN   TestS\n"}`,
			`{"Action":"output","Package":"p","Test":"TestS","Output":"    s_test.go:9: `+reason+`\n"}`,
			`{"Action":"output","Package":"p","Test":"TestS","Output":"--- SKIP: TestS (0.00s)\n"}`,
			`{"Action":"skip","Package":"p","Test":"TestS"}`)
	}
	for _, c := range []struct {
		name, in string
		ok       bool
		want     []string
		not      []string
	}{
		{"pass", pass, true, []string{"make: entering\n", "ok  \tp\t0.1s\n", "1 passed, 0 failed, 0 skipped\n"}, []string{"noise", "PASS"}},
		{"benchmark", run(
			`{"Action":"run","Package":"p","Test":"TestA"}`,
			`{"Action":"output","Package":"p","Test":"TestA","Output":"    a_test.go:1: noise\n"}`,
			`{"Action":"output","Package":"p","Test":"TestA","Output":"BenchmarkA/b\n"}`,
			`{"Action":"output","Package":"p","Test":"TestA","Output":"BenchmarkA/b-2  \t 100\t 5 ns/op\n"}`,
			`{"Action":"pass","Package":"p","Test":"TestA"}`), true, []string{"BenchmarkA/b-2  \t 100\t 5 ns/op\n", "1 passed"}, []string{"noise", "BenchmarkA/b\n"}},
		{"kernel skip", skipped("need: kernel 6.6 for tcx"), true, []string{"skipped: p TestS: need: kernel 6.6 for tcx", "1 passed, 0 failed, 1 skipped"}, nil},
		{"root skip", skipped("need: root"), false, []string{"must not skip: p TestS: need: root"}, nil},
		{"lookalike", skipped("need: kernelless"), false, []string{"must not skip"}, nil},
		{"undeclared skip", skipped("not today"), false, []string{"must not skip"}, nil},
		{"fail", pass + run(
			`{"Action":"output","Package":"q","Test":"TestF","Output":"=== RUN   TestF\n"}`,
			`{"Action":"output","Package":"q","Test":"TestF","Output":"    f_test.go:2: got 1, want 2\n"}`,
			`{"Action":"fail","Package":"q","Test":"TestF"}`,
			`{"Action":"output","Package":"q","Output":"FAIL\tq\t0.1s\n"}`,
			`{"Action":"fail","Package":"q"}`),
			false, []string{"got 1, want 2", "FAIL\tq", "1 passed, 1 failed"}, []string{"=== RUN"}},
		{"panic", run(
			`{"Action":"output","Package":"q","Test":"TestP","Output":"panic: boom\n"}`,
			`{"Action":"output","Package":"q","Output":"FAIL\tq\t0.1s\n"}`,
			`{"Action":"fail","Package":"q"}`),
			false, []string{"panic: boom", "0 passed, 1 failed"}, nil},
		{"broken off", pass + run(
			`{"Action":"output","Package":"q","Test":"TestT","Output":"panic: test timed out after 1s\n"}`),
			false, []string{"panic: test timed out", "1 passed, 1 failed"}, nil},
		{"build error", pass + run(
			`{"ImportPath":"b","Action":"build-output","Output":"b.go:1: undefined: x\n"}`,
			`{"ImportPath":"b","Action":"build-fail"}`,
			`{"Action":"output","Package":"b","Output":"FAIL\tb [build failed]\n"}`,
			`{"Action":"fail","Package":"b","FailedBuild":"b"}`),
			false, []string{"undefined: x", "build failed"}, nil},
		{"nothing", run(`make: nothing`), false, []string{"no test ran"}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out strings.Builder
			r := newReport(&out, []string{"kernel"})
			if err := r.read(strings.NewReader(c.in)); err != nil {
				t.Fatal(err)
			}
			if ok := r.finish(); ok != c.ok {
				t.Errorf("ok = %v, want %v; printed:\n%s", ok, c.ok, out.String())
			}
			for _, s := range c.want {
				if !strings.Contains(out.String(), s) {
					t.Errorf("does not print %q:\n%s", s, out.String())
				}
			}
			for _, s := range c.not {
				if strings.Contains(out.String(), s) {
					t.Errorf("prints %q:\n%s", s, out.String())
				}
			}
		})
	}
}
