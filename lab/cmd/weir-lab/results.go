// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/weir-project/weir/internal/terminal"
	"github.com/weir-project/weir/lab"
)

func resultsCommand() *cobra.Command {
	var out string
	var quick bool
	c := &cobra.Command{
		Use: "results [EXPERIMENT...]", Short: "Run experiments and write the measurements",
		Long: `Run every experiment and write the measurements to a file. With names, run only these
experiments and replace their sections of the file. Other sections stay unchanged.`,
		Example: `  sudo weir-lab results
  sudo weir-lab results table guard --quick`,
		Args: func(_ *cobra.Command, names []string) error {
			for _, name := range names {
				if _, err := lab.Lookup(name); err != nil {
					return wrong(err)
				}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, names []string) error {
			if os.Geteuid() != 0 {
				return cannot{errors.New("network namespaces and BPF programs need root: run it with sudo")}
			}
			f := runFlags{quick: quick}
			before := map[string]string{}
			if len(names) > 0 {
				b, err := os.ReadFile(out)
				if err != nil {
					return err
				}
				before = sections(string(b))
			}
			var page bytes.Buffer
			fmt.Fprintf(&page, "# Results\n\nWritten by `make results` on %s. Failed claims are marked **falls short**.\n", time.Now().Format(time.DateOnly))
			failed, err := measure(cmd.Context(), os.Stderr, &page, lab.Experiments(), func(x lab.Experiment) (string, bool) {
				return before[x.Name], len(names) > 0 && !slices.Contains(names, x.Name)
			}, lab.Options{Size: f.size(), Seed: 1, Pictures: filepath.Dir(out)})
			if err != nil {
				return err
			}
			if err := os.WriteFile(out, page.Bytes(), 0o644); err != nil {
				return err
			}
			if failed {
				return errClaims
			}
			return nil
		},
	}
	c.Flags().StringVar(&out, "out", "docs/RESULTS.md", "file to write")
	c.Flags().BoolVar(&quick, "quick", false, "limit each experiment to 60 s")
	return c
}

// measure runs experiments and writes their sections to page. kept returns the old section of an experiment to omit. The
// log goes to w, and its progress if w is a terminal.
func measure(ctx context.Context, w io.Writer, page io.Writer, all []lab.Experiment, kept func(lab.Experiment) (string, bool), o lab.Options) (failed bool, err error) {
	runs := int64(0)
	for _, x := range all {
		if _, keep := kept(x); !keep {
			runs++
		}
	}
	line, done := terminal.Start(w, "experiments"), int64(0)
	defer line.Stop()
	o.Watch = &lab.Log{W: line.Writer(w), Since: time.Now()}
	for _, x := range all {
		if old, keep := kept(x); keep {
			fmt.Fprint(page, old)
			continue
		}
		line.Step(fmt.Sprintf("experiment %d of %d, %s", done+1, runs, x.Name))
		line.Of(done, runs)
		r, err := lab.Execute(ctx, x, o)
		if err != nil {
			return failed, fmt.Errorf("%s: %w; no file was written", x.Name, err)
		}
		done++
		failed = failed || r.Failed(false)
		writeResult(page, r, x)
	}
	return failed, nil
}

// sections returns the sections of a page by experiment, each with its heading and the preceding empty
// line.
func sections(page string) map[string]string {
	all := map[string]string{}
	for _, s := range strings.Split(page, "\n## ")[1:] {
		name, _, _ := strings.Cut(s, "\n")
		all[name] = "\n## " + strings.TrimRight(s, "\n") + "\n"
	}
	return all
}

// writeResult writes one experiment as a section of Markdown.
func writeResult(w io.Writer, r *lab.Result, x lab.Experiment) {
	fmt.Fprintf(w, "\n## %s\n\n%s. Size %s, kernel %s, seed %d.\n\n", r.Experiment, x.Short, r.Size, r.Kernel, r.Seed)
	fmt.Fprintf(w, "| claim | kind | metric | want | got | |\n| --- | --- | --- | --- | --- | --- |\n")
	for _, c := range r.Claims {
		verdict := "holds"
		if !c.OK {
			verdict = "**falls short**"
		}
		fmt.Fprintf(w, "| %s | %s | `%s` | %s | %.6g | %s |\n", c.Claim, c.Kind, c.Metric, c.Want, c.Got, verdict)
	}
	fmt.Fprintf(w, "\nAll measurements:\n\n| metric | value |\n| --- | --- |\n")
	for _, m := range slices.Sorted(maps.Keys(r.Metrics)) {
		fmt.Fprintf(w, "| `%s` | %.6g |\n", m, r.Metrics[m])
	}
	for _, p := range r.Pictures {
		fmt.Fprintf(w, "\n![%s](%s)\n", strings.TrimSuffix(p, ".svg"), p)
	}
	for _, s := range r.Skipped {
		fmt.Fprintf(w, "\nSkipped: %s\n", s)
	}
	for _, n := range r.Notes {
		fmt.Fprintf(w, "\nNote: %s\n", n)
	}
}
