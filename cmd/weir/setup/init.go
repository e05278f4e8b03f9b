// SPDX-License-Identifier: Apache-2.0

package setup

import (
	"cmp"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/host"
	fmt "github.com/weir-project/weir/internal/printable"
)

// defaultConfig is the configuration of the packaged unit.
const defaultConfig = "/etc/weir/weir.yaml"

// Init returns weir init.
func Init(g *cli.Globals) *cobra.Command {
	var file string
	var stdout bool
	c := &cobra.Command{
		Use: "init", Short: "Write a first configuration for the programs of this host", Args: cobra.NoArgs,
		Long: `Look at this host, in all named network namespaces, and write a commented
configuration for it. It names servers with their units and sockets, SO_REUSEPORT
groups and telemetry collectors. It also names routing daemons with their BFD
neighbours, nftables rules, and BPF programs of others. Collectors get active
sections. Everything else is a suggestion behind a #. weir apply --dry-run accepts
the file: weir init tries it first.

The command changes nothing else. It never replaces a file. Root sees the processes
of all users.`,
		Example: `  weir init
  weir init --stdout
  weir init -o /root/weir.yaml`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			file = cmp.Or(file, defaultConfig)
			if stdout = stdout || file == "-"; !stdout {
				if _, err := os.Lstat(file); err == nil {
					return host.Draft{}.WriteNew(file) // says that the file exists
				}
			}
			d, err := g.Host().Draft(cmd.Context())
			if err != nil {
				return err
			}
			if stdout {
				_, err := cmd.OutOrStdout().Write(d.Text)
				printDraft(cmd.ErrOrStderr(), d, "weir.yaml")
				return err
			}
			if file == defaultConfig {
				if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
					return fmt.Errorf("write the configuration: %w; name another file with -o FILE, or print it with --stdout", err)
				}
			}
			if err := d.WriteNew(file); err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), "wrote", file)
			printDraft(cmd.OutOrStdout(), d, file)
			return nil
		},
	}
	c.Flags().StringVarP(&file, "output", "o", "", "file to write, - for standard output (default "+defaultConfig+")")
	c.Flags().BoolVar(&stdout, "stdout", false, "print the configuration")
	c.MarkFlagFilename("output", "yaml", "yml")
	return c
}

// printDraft prints the findings and the next steps.
func printDraft(w io.Writer, d host.Draft, file string) {
	for _, f := range d.Found {
		fmt.Fprintln(w, "found:", f)
	}
	if len(d.Found) == 0 {
		fmt.Fprintln(w, "found: nothing to configure; the file has an example")
	}
	for _, u := range d.Unseen {
		fmt.Fprintln(w, "not seen:", u)
	}
	for _, l := range d.LeftOut {
		fmt.Fprintln(w, "not in force:", l)
	}
	for _, r := range d.Replaces {
		fmt.Fprintln(w, "warning: another configuration is in force, and this file would replace it:", r)
	}
	fmt.Fprintf(w, "next:\n  weir apply --dry-run -f %s\n  weir apply -f %s\n  systemctl enable --now weir\n", file, file)
}
