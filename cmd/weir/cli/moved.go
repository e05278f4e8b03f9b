// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/weir-project/weir/host"
	fmt "github.com/weir-project/weir/internal/printable"
)

// MovedCommand returns a command whose file has become a section of weir.yaml. The command fails with that section,
// converted from the file.
func MovedCommand(name, section, only string) *cobra.Command {
	var file string
	c := &cobra.Command{
		Use: name, Hidden: true, Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			instead := fmt.Errorf("%s is now the section %s of weir.yaml: run weir serve -f weir.yaml, or add --only %s to run it alone", cmd.CommandPath(), section, only)
			if file == "" {
				return Usage(instead)
			}
			_, err := host.LoadConfig(file)
			if moved, ok := errors.AsType[*host.MovedError](err); ok {
				return Usage(fmt.Errorf("%w\n%w", instead, moved))
			}
			return Usage(errors.Join(instead, err))
		},
	}
	c.Flags().StringVarP(&file, "file", "f", "", "the former file")
	return c
}
