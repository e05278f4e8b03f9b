// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/weir-project/weir/internal/terminal"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/cast"
	"github.com/weir-project/weir/lab/demo"
)

// The size of a recorded screen. The tables of weir fit it, and its text is readable on a page.
const (
	recordColumns = 130
	recordRows    = 28
)

// demoFlags are the flags of `weir-lab demo`.
type demoFlags struct {
	smoke, names bool
	record       string
	keep         string
}

func demoCommand() *cobra.Command {
	var f demoFlags
	c := &cobra.Command{
		Use: "demo [NAME]", Short: "Show one system of weir on this machine",
		Long: `Show one system of weir on this machine, with real software in network namespaces
that it removes. Without NAME, list the demonstrations. Each takes at most 60 s,
telemetry 120 s.

A terminal shows a live picture and the commands of a person, a pipe only lines.
Exit status: as weir-lab run.`,
		Example: `  weir-lab demo
  sudo weir-lab demo steer
  sudo weir-lab demo steer --record docs/demo`,
		Args: func(cmd *cobra.Command, args []string) error { return wrong(cobra.MaximumNArgs(1)(cmd, args)) },
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return demo.Names(), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				listDemos(cmd.OutOrStdout(), f.names)
				return nil
			}
			d, err := demo.Lookup(args[0])
			if err != nil {
				return usage{err}
			}
			return f.play(cmd.Context(), d)
		},
	}
	c.Flags().BoolVar(&f.smoke, "smoke", false, "shortest form for tests, without pauses for readers")
	c.Flags().BoolVar(&f.names, "names", false, "print only the names, one a line")
	c.Flags().StringVar(&f.record, "record", "", "write NAME.cast (asciicast) and NAME.svg into this directory")
	c.Flags().StringVar(&f.keep, "keep", "", "keep logs and output of every process in this new directory")
	return c
}

func listDemos(w io.Writer, names bool) {
	for _, d := range demo.All() {
		if names {
			fmt.Fprintln(w, d.Name)
		} else {
			fmt.Fprintf(w, "%-10s %s\n", d.Name, d.Short)
		}
	}
	if !names {
		fmt.Fprintln(w, "\nsudo weir-lab demo NAME runs one.")
	}
}

// play runs a demonstration before a terminal, a pipe or a recorder.
func (f demoFlags) play(ctx context.Context, d demo.Demo) error {
	if os.Geteuid() != 0 {
		return cannot{errors.New("network namespaces and BPF programs need root: run it with sudo")}
	}
	o := lab.Options{Size: lab.Full, Seed: uint64(rand.Uint32()), Keep: f.keep}
	if f.smoke {
		o.Size = lab.Smoke
	}
	title := "weir demo " + d.Name
	var screens []io.Writer
	size := lab.SizeOf(os.Stdout)
	var recorder *cast.Recorder
	if f.record != "" {
		if err := os.MkdirAll(f.record, 0o755); err != nil {
			return err
		}
		o.Seed = 1 // recordings repeat
		recorder = cast.New(title, recordColumns, recordRows)
		size = func() (int, int) { return recordColumns, recordRows }
		screens = append(screens, recorder)
	}
	live := terminal.Is(os.Stdout)
	if live {
		screens = append(screens, os.Stdout)
	}
	done, end := func() {}, "\n"
	if recorder != nil {
		end = "\r\n" // a terminal without a driver
	}
	if len(screens) > 0 {
		t := lab.NewTerminal(io.MultiWriter(screens...), title, size)
		o.Watch, done = t, t.Close
	}
	if !live {
		lines := &lab.Log{W: os.Stdout, Since: time.Now()}
		if o.Watch == nil {
			o.Watch = lines
		} else {
			o.Watch = lab.Both{o.Watch, lines}
		}
		screens = append(screens, os.Stdout)
	}
	audience := demo.Audience{Reads: live || recorder != nil}
	kept := false
	if recorder != nil {
		o.Pictures = f.record
		audience.Still = func() { recorder.Still(); kept = true }
	}
	r, summary, err := d.Play(ctx, o, audience)
	if recorder != nil && !kept {
		recorder.Still()
	}
	done()
	if ctx.Err() != nil {
		return fmt.Errorf("interrupted; cleanup done (%g left over)", r.Metrics[lab.LeftoversMetric])
	}
	if err != nil {
		if impossible(err) {
			err = cannot{err}
		}
		printNotes(os.Stderr, r)
		return err
	}
	columns := terminal.Columns(os.Stdout) // also of a dumb terminal
	if recorder != nil {
		columns, _ = size()
	}
	for line := range strings.Lines(summaryText(d, summary, columns)) {
		fmt.Fprint(io.MultiWriter(screens...), strings.TrimSuffix(line, "\n")+end)
	}
	if r.Failed(false) {
		printNotes(os.Stderr, r)
		return errClaims
	}
	if recorder != nil {
		return f.write(recorder, d.Name)
	}
	return nil
}

// summaryText returns the last lines of a demonstration, wrapped at columns; 0 for no wrapping.
func summaryText(d demo.Demo, summary []string, columns int) string {
	lines := append([]string{"", d.Name + ": " + d.Short, ""}, summary...)
	return terminal.WrapAt(columns, strings.Join(lines, "\n")+"\n", "  ")
}

// write writes the recording.
func (f demoFlags) write(r *cast.Recorder, name string) error {
	b, err := r.Cast()
	if err != nil {
		return err
	}
	return errors.Join(os.WriteFile(filepath.Join(f.record, name+".cast"), b, 0o644), os.WriteFile(filepath.Join(f.record, name+".svg"), r.SVG(), 0o644))
}
