// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/weir-project/weir/lab"
)

// Stage is a running demonstration: its environment, and its steps for spectators.
type Stage struct {
	*lab.Env
	Result *lab.Result

	audience Audience
	checks   int
	failed   int
	sums     []string
}

// Say explains the next step in a sentence, and leaves time to read it.
func (s *Stage) Say(ctx context.Context, format string, a ...any) error {
	s.Watch.Log(format, a...)
	return s.Pace(ctx, time.Duration(len(strings.Fields(fmt.Sprintf(format, a...))))*120*time.Millisecond)
}

// Pace waits for spectators. In a pipe and in the shortest form it does not.
func (s *Stage) Pace(ctx context.Context, d time.Duration) error {
	if !s.audience.Reads || s.Short() {
		return ctx.Err()
	}
	return pause(ctx, d)
}

// Typed shows a command of a person, run by the demonstration itself.
func (s *Stage) Typed(format string, a ...any) { s.Watch.Print("$ " + fmt.Sprintf(format, a...)) }

// Output shows the first lines of a command's output, with the names of a machine in place of the run's.
func (s *Stage) Output(text string, lines int) {
	if strings.TrimSpace(text) == "" {
		return
	}
	all := strings.Split(strings.TrimRight(text, "\n"), "\n")
	all = slices.DeleteFunc(all, func(l string) bool {
		return strings.TrimSpace(l) == "" || strings.Contains(l, "certificate expires") // certificates of a run last an hour
	})
	all = rename(all, s.Dir, "/run")
	all = rename(all, filepath.Base(s.Dir)+"-", "")
	shown := all[:min(len(all), lines)]
	for i, l := range shown {
		shown[i] = "  " + strings.TrimRight(l, " ")
	}
	if n := len(all) - len(shown); n > 0 {
		shown = append(shown, fmt.Sprintf("  … (%d more)", n))
	}
	s.Watch.Print(shown...)
}

// rename replaces a name by a shorter one, and keeps the columns of tables.
func rename(lines []string, from, to string) (out []string) {
	for len(lines) > 0 {
		n := 1
		for row(lines[0]) && n < len(lines) && row(lines[n]) {
			n++
		}
		out = append(out, renameTable(lines[:n], from, to)...)
		lines = lines[n:]
	}
	return out
}

// row reports whether a line is a row of a table: it has several spaces between columns.
func row(l string) bool { return strings.Contains(strings.TrimSpace(l), "  ") }

// renameTable renames in one table, or in one line outside tables.
func renameTable(lines []string, from, to string) []string {
	out, column := make([]string, len(lines)), -1
	for i, l := range lines {
		out[i] = strings.ReplaceAll(l, from, to)
		if at := strings.Index(l, from); column < 0 {
			column = at
		}
	}
	if column < 0 {
		return lines
	}
	begin, end := column+len(to), column+len(from)
	for i, l := range lines {
		if !strings.Contains(l, from) && len(l) > end && strings.TrimSpace(l[begin:end]) == "" {
			out[i] = l[:begin] + l[end:]
		}
	}
	return out
}

// Check records a fact of the demonstration. If it does not hold, the demonstration fails at its end.
func (s *Stage) Check(holds bool, format string, a ...any) {
	fact := fmt.Sprintf(format, a...)
	mark, value := "✓", 1.0
	if !holds {
		mark, value = "✗", 0
		s.failed++
	}
	s.checks++
	metric := fmt.Sprintf("check_%02d", s.checks)
	s.Result.Set(metric, value)
	s.Result.Claim(lab.Correctness, fact, metric, "== 1")
	s.Watch.Print(mark + " " + fact)
}

// Sum adds a line to the summary.
func (s *Stage) Sum(format string, a ...any) { s.sums = append(s.sums, fmt.Sprintf(format, a...)) }

// Still keeps the present screen as the picture of a recording. Without a call the last one is kept.
func (s *Stage) Still() {
	if s.audience.Still != nil {
		s.audience.Still()
	}
}

// Live draws a picture a few times a second until the demonstration ends.
func (s *Stage) Live(picture func() []string) {
	stop, done := make(chan struct{}), make(chan struct{})
	s.OnClose(func() { close(stop); <-done })
	go func() {
		defer close(done)
		tick := time.NewTicker(250 * time.Millisecond)
		defer tick.Stop()
		for {
			s.Watch.Show(picture())
			select {
			case <-stop:
				return
			case <-tick.C:
			}
		}
	}()
}

// Short reports whether the demonstration runs in its shortest form.
func (s *Stage) Short() bool { return s.Size == lab.Smoke }

// maxSummary is the longest summary, in lines.
const maxSummary = 20

// summary returns the lines for the end: the demonstration's own, the failed checks, the result.
func (s *Stage) summary(r *lab.Result) []string {
	lines := s.sums
	for _, c := range r.Claims {
		if !c.OK {
			lines = append(lines, "✗ "+c.Claim)
		}
	}
	if len(lines) > maxSummary-1 {
		lines = lines[:maxSummary-1]
	}
	return append(lines, fmt.Sprintf("%d of %d checks hold; %.0f s; %g objects left behind", s.checks-s.failed, s.checks, r.Metrics["seconds"], r.Metrics[lab.LeftoversMetric]))
}

// pause waits for d, or for the end of the run.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

// within waits until f holds. The error names the awaited state, and the last error of f.
func within(ctx context.Context, limit time.Duration, state string, f func() error) error {
	for end := time.Now().Add(limit); ; {
		err := f()
		if err == nil {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("%s: not after %s: %w", state, limit, err)
		}
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
}

// patience is the longest wait for a daemon or a state on a busy machine.
const patience = 60 * time.Second

// all runs steps one after another.
func all(ctx context.Context, steps ...func(context.Context) error) error {
	for _, step := range steps {
		if err := errors.Join(ctx.Err(), step(ctx)); err != nil {
			return err
		}
	}
	return nil
}
