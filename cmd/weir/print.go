// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"io"
	"log/slog"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	fmt "github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/internal/ratelog"
)

func printJSON(cmd *cobra.Command, v any) error {
	enc := json.NewEncoder(fmt.Writer(cmd.OutOrStdout()))
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// newLog is the log of a process: bounded, and harmless to the terminal.
func newLog(w io.Writer) *slog.Logger {
	return ratelog.Limit(slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{ReplaceAttr: fmt.Attr})))
}

// table aligns rows of cells, the first being the heading.
type table struct{ w *tabwriter.Writer }

func newTable(w io.Writer, heading ...any) table {
	t := table{tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)}
	t.row(heading...)
	return t
}

func (t table) row(cells ...any) {
	for i, c := range cells {
		if i > 0 {
			_, _ = io.WriteString(t.w, "\t") // as fmt.Fprint
		}
		fmt.Fprint(t.w, c)
	}
	fmt.Fprintln(t.w)
}

func (t table) flush() { t.w.Flush() }

// ago says how long since, as people do.
func ago(t, now time.Time) string {
	if t.IsZero() {
		return "-"
	}
	d := now.Sub(t)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// bytes prints a size in powers of 1024.
func bytes(n uint64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	v, u := float64(n)/1024, 0
	for v >= 1024 && u < len(units)-1 {
		v /= 1024
		u++
	}
	return fmt.Sprintf("%.1f %ciB", v, units[u])
}
