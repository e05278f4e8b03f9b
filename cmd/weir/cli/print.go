// SPDX-License-Identifier: Apache-2.0

package cli

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

// PrintJSON prints v, harmless to the terminal.
func PrintJSON(cmd *cobra.Command, v any) error {
	enc := json.NewEncoder(fmt.Writer(cmd.OutOrStdout()))
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// NewLog is the log of a process: bounded, and harmless to the terminal.
func NewLog(w io.Writer) *slog.Logger {
	return ratelog.Limit(slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{ReplaceAttr: fmt.Attr})))
}

// Table aligns rows of cells, the first being the heading.
type Table struct{ w *tabwriter.Writer }

// NewTable begins a table.
func NewTable(w io.Writer, heading ...any) Table {
	t := Table{tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)}
	t.Row(heading...)
	return t
}

// Row adds a row.
func (t Table) Row(cells ...any) {
	for i, c := range cells {
		if i > 0 {
			_, _ = io.WriteString(t.w, "\t") // as fmt.Fprint
		}
		fmt.Fprint(t.w, c)
	}
	fmt.Fprintln(t.w)
}

// Flush writes the table.
func (t Table) Flush() { t.w.Flush() }

// Ago says how long since, as people do.
func Ago(t, now time.Time) string {
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

// Bytes prints a size in powers of 1024.
func Bytes(n uint64) string {
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
