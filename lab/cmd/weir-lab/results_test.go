// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"io"
	"strings"
	"testing"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/lab"
)

// A terminal shows the running experiment below the log. A pipe gets only the log.
func TestResultsProgress(t *testing.T) {
	nstest.NeedRoot(t)
	t.Setenv("TERM", "xterm")
	p := nstest.NewPTY(t, 80)
	waits := func(text string) {}
	var all []lab.Experiment
	for _, name := range []string{"first", "second", "third"} {
		all = append(all, lab.Experiment{Name: name, Short: name, Run: func(_ context.Context, e *lab.Env, _ *lab.Result) error {
			e.Watch.Log("running %s", name)
			waits(name)
			return nil
		}})
	}
	kept := func(x lab.Experiment) (string, bool) { return "old second\n", x.Name == "second" }
	var piped, page bytes.Buffer
	for _, w := range []io.Writer{p.File, &piped} {
		waits = func(string) {}
		if w == p.File {
			waits = func(name string) {
				p.Wait(map[string]string{"first": `\rexperiment 1 of 2, first \[\.{20}\]   0 %, \d+ s\x1b\[K\r`, "third": `\rexperiment 2 of 2, third \[#{10}\.{10}\]  50 %, \d+ s\x1b\[K\r`}[name])
			}
		}
		page.Reset()
		if _, err := measure(t.Context(), w, &page, all, kept, lab.Options{Size: lab.Smoke, Seed: 1}); err != nil {
			t.Fatal(err)
		}
	}
	p.Wait(`\r\x1b\[K\r`)
	if s := piped.String(); strings.ContainsAny(s, "\r\x1b") || strings.Contains(s, " of 2") || strings.Count(s, "] running ") != 2 {
		t.Errorf("a pipe got %q", s)
	}
	if s := page.String(); strings.Count(s, "## ") != 2 || !strings.Contains(s, "old second") {
		t.Errorf("the page is %q", s)
	}
}
