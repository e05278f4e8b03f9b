// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"io"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/kernel"
)

// TellFaults prints a feature's faults, before its status.
func TellFaults(cmd *cobra.Command, g *Globals, feature string) {
	if faults, err := g.Reader().Faults(cmd.Context()); err == nil {
		PrintFaults(cmd.OutOrStdout(), faults, feature)
	}
}

// PrintFaults prints damaged pins and foreign programs of one feature, or of all features if feature is "".
func PrintFaults(w io.Writer, faults []kernel.Fault, feature string) {
	for _, f := range faults {
		if feature == "" || f.Feature == feature || f.Feature == "" {
			Note(w, "! %s: %s\n", f, f.Remedy)
		}
	}
}
