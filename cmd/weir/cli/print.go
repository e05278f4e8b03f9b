// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"io"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	fmt "github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/internal/ratelog"
	"github.com/weir-project/weir/internal/terminal"
)

// Note prints a line like fmt.Fprintf. A terminal's line ends at its width, between words, and goes on with an indent.
func Note(w io.Writer, format string, args ...any) {
	var b strings.Builder
	fmt.Fprintf(&b, format, args...)
	text := b.String()
	indent := len(text) - len(strings.TrimLeft(text, " "))
	_, _ = io.WriteString(w, terminal.Wrap(w, text, strings.Repeat(" ", indent+2))) // ignore the error, like fmt.Fprintf
}

// PrintJSON prints v as JSON, with terminal control characters escaped.
func PrintJSON(cmd *cobra.Command, v any) error {
	enc := json.NewEncoder(fmt.Writer(cmd.OutOrStdout()))
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// Reading shows the progress of reading a file, and of further work, on the terminal of standard error. A person who
// types the input sees no line.
func Reading(cmd *cobra.Command, file string) *terminal.Line {
	if file != "-" {
		return terminal.Start(cmd.ErrOrStderr(), fmt.Sprintf("reading %s", file))
	}
	if in, ok := cmd.InOrStdin().(*os.File); ok && terminal.Is(in) {
		return nil
	}
	return terminal.Start(cmd.ErrOrStderr(), "reading standard input")
}

// NewLog returns the log of a process. It is rate-limited and escapes terminal control characters.
func NewLog(w io.Writer) *slog.Logger {
	return ratelog.Limit(slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{ReplaceAttr: fmt.Attr})))
}

// Ago formats the time from t to now, as in "5m07s"; "-" for the zero time.
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

// Bytes formats a size in powers of 1024.
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
