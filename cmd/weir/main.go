// SPDX-License-Identifier: Apache-2.0

// Command weir controls the traffic of a Linux host from inside its kernel.
package main

import (
	"cmp"
	"errors"
	"io"
	"os"
	"runtime"
	"strings"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/cmd/weir/setup"
	"github.com/weir-project/weir/host"
	fmt "github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/internal/safefile"
	"github.com/weir-project/weir/internal/terminal"
	"github.com/weir-project/weir/kernel"
)

// version is set by the linker.
var version = "devel"

// Exit statuses of weir.
const (
	exitFailed = 1
	exitUsage  = 2 // wrong command line
	exitCannot = 3 // unsupported kernel, unreadable pins or missing permission
)

// instead, in a generator's build, does the generator's work and ends the process. It runs in main, because a command
// registers itself in init.
var instead = func() {}

func main() {
	instead()
	if len(os.Args) > 2 && os.Args[1] == launchVerb {
		launch(os.Args[2:])
	}
	ctx, stop := untilSignal()
	defer stop()
	host.SetVersion(version)
	tellWait := func(text string) {
		terminal.Clear()
		fmt.Fprintln(os.Stderr, "weir:", text)
	}
	kernel.OnWait(tellWait)
	safefile.OnWait(tellWait)
	c, out := newCommand(), &keptOutput{Writer: os.Stdout}
	c.SetOut(out)
	err := c.ExecuteContext(ctx)
	if _, changed := kernel.Writing(); err == nil && changed && out.err != nil {
		fmt.Fprintln(os.Stderr, "weir: the change is in force, but its report could not be written:", out.err)
	} else if err == nil {
		err = out.err
	}
	if err != nil {
		if status, ok := errors.AsType[daemonStatus](err); ok {
			os.Exit(int(status)) // weir steer run has printed the daemon's own message
		}
		terminal.Clear()
		err = ended(ctx, err)
		cli.Note(os.Stderr, "weir: %v\n", err)
		os.Exit(exitStatus(err))
	}
}

// keptOutput keeps the first write error, for example of a full disk. A command fails if its output is lost. A command
// that has changed the host still succeeds, because callers take a failure for "nothing was changed".
type keptOutput struct {
	io.Writer
	err error
}

// Fd returns the descriptor of standard output, for terminal.Is.
func (o *keptOutput) Fd() uintptr { return os.Stdout.Fd() }

func (o *keptOutput) Write(b []byte) (int, error) {
	n, err := o.Writer.Write(b)
	o.err = cmp.Or(o.err, err)
	return n, err
}

func exitStatus(err error) int {
	switch {
	case errors.Is(err, cli.ErrUsage):
		return exitUsage
	case errors.Is(err, kernel.ErrUnsupported), errors.Is(err, kernel.ErrUnreadable), errors.Is(err, os.ErrPermission):
		return exitCannot
	}
	return exitFailed
}

// helpColumns is the width of all help texts, on any terminal.
const helpColumns = 80

func newCommand() *cobra.Command {
	g := &cli.Globals{}
	c := &cobra.Command{
		Use:   "weir",
		Short: "Control this host's traffic from inside its kernel",
		Long: `weir controls traffic inside the kernel of this host. It steers connections and
datagrams to processes, limits UDP floods, filters packets and reroutes traffic off
failed links. The processes need no change. State lives in pinned BPF maps: no weir
process is in the data path.
` + overview(),
		Version:           version,
		SilenceErrors:     true,
		SilenceUsage:      true,
		PersistentPreRunE: func(*cobra.Command, []string) error { return kernel.OpenRoot(g.Root).CheckName() },
	}
	c.SetVersionTemplate(versionLine() + "\n")
	c.SetUsageTemplate(strings.ReplaceAll(c.UsageTemplate(), "FlagUsages |", fmt.Sprintf("FlagUsagesWrapped %d |", helpColumns)))
	c.PersistentFlags().StringVar(&g.Root, "root", "", "directory of pins (default $WEIR_ROOT or "+kernel.DefaultRoot+")")
	c.PersistentFlags().StringVar(&g.Socket, "socket", host.DefaultSocket, "socket of weir serve, for users without access to the pins")
	c.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return cli.Usage(fmt.Errorf("%w; see %s --help", flagError(cmd, err), cmd.CommandPath()))
	})
	c.AddCommand(doctorCommand(g), applyCommand(g), confirmCommand(g), rollbackCommand(g), statusCommand(g), upgradeCommand(g), removeCommand(g), serveCommand(g), prepareCommand(g), explainCommand(g), setup.Init(g), setup.Examples(), versionCommand(g))
	for _, f := range cli.Features() {
		for _, own := range f.Commands(g) {
			own.Annotations = map[string]string{ownerKey: f.Name}
			c.AddCommand(own)
		}
	}
	// cobra adds these commands in Execute, too late for wrapArgs.
	completionCommand(c)
	c.InitDefaultHelpCmd()
	for _, sub := range allCommands(c) {
		sub.Long = cli.Reflow(sub.Long, helpColumns)
		wrapArgs(sub)
		complete(sub, g)
	}
	return c
}

func allCommands(c *cobra.Command) []*cobra.Command {
	out := []*cobra.Command{c}
	for _, s := range c.Commands() {
		out = append(out, allCommands(s)...)
	}
	return out
}

// wrapArgs makes wrong arguments exit with status 2, and makes group commands reject unknown subcommands.
func wrapArgs(c *cobra.Command) {
	check := c.Args
	switch {
	case c.Name() == "help":
		check = func(cmd *cobra.Command, args []string) error {
			about, rest, err := cmd.Root().Find(args)
			if err != nil || about == nil {
				return unknownCommand(cmd.Root(), args)
			}
			return unknownCommand(about, rest)
		}
	case !c.Runnable() || c.Name() == "completion":
		c.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
		check = unknownCommand
		checkHelp(c)
	}
	c.Args = func(cmd *cobra.Command, args []string) error {
		if check == nil {
			return nil
		}
		if err := check(cmd, args); err != nil {
			// cobra.NoArgs reports "unknown command" for a stray file name. Report the real cause.
			if cmd.RunE != nil && !cmd.HasSubCommands() && strings.HasPrefix(err.Error(), "unknown command") {
				err = fmt.Errorf("%s takes no arguments, got %q", cmd.CommandPath(), args[0])
			} else if strings.HasPrefix(err.Error(), "accepts ") || strings.HasPrefix(err.Error(), "requires ") {
				err = fmt.Errorf("want %s, got %s", strings.TrimSuffix(cmd.UseLine(), " [flags]"), fmt.Count(len(args), "argument"))
			}
			return cli.Usage(fmt.Errorf("%w; see %s --help", err, cmd.CommandPath()))
		}
		return nil
	}
	c.SuggestionsMinimumDistance = 2
}

// unknownCommand returns an error for args[0], an unknown subcommand of cmd, or nil if there are no arguments.
func unknownCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	msg := fmt.Sprintf("unknown command %q for %q", args[0], cmd.CommandPath())
	if s := cmd.SuggestionsFor(args[0]); len(s) > 0 {
		msg += fmt.Sprintf("; did you mean %q?", s[0])
	}
	return errors.New(msg)
}

func versionLine() string {
	return fmt.Sprintf("weir %s, %s, pins: layout %d", version, runtime.Version(), kernel.LayoutVersion)
}

func versionCommand(g *cli.Globals) *cobra.Command {
	c := &cobra.Command{
		Use: "version", Short: "Print the versions of weir and of its pin layout", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := struct {
				Version string `json:"version"`
				Go      string `json:"go"`
				Layout  int    `json:"layout"`
			}{version, runtime.Version(), kernel.LayoutVersion}
			if g.JSON {
				return cli.PrintJSON(cmd, v)
			}
			fmt.Fprintln(cmd.OutOrStdout(), versionLine())
			return nil
		},
	}
	cli.JSONFlag(c, g)
	return c
}
