// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"os"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/host"
)

// ErrUsage marks errors about the command line itself.
var ErrUsage = errors.New("usage")

// Usage wraps err: the text stays, and the exit status becomes 2.
func Usage(err error) error { return usage{err} }

type usage struct{ error }

func (usage) Is(target error) bool { return target == ErrUsage }
func (u usage) Unwrap() error      { return u.error }

// Globals are the flags common to all commands.
type Globals struct {
	Root   string
	Socket string
	JSON   bool
}

// Host returns the host of --root. Its warnings go to standard error.
func (g *Globals) Host() *host.Host {
	h := host.New(g.Root)
	h.Warned = func(warning string) { Note(os.Stderr, "warning: %s\n", warning) }
	return h
}

// Reader returns a reader of the pins, or of weir serve's socket if the pins are not readable.
func (g *Globals) Reader() host.Reader { return g.Host().Reader(g.Socket) }

// JSONFlag adds the flag --json to a command.
func JSONFlag(c *cobra.Command, g *Globals) {
	c.Flags().BoolVar(&g.JSON, "json", false, "print JSON")
}
