// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/host"
)

// ErrUsage marks errors about the command line itself.
var ErrUsage = errors.New("usage")

// Usage keeps the text of err and makes the exit status 2.
func Usage(err error) error { return usage{err} }

type usage struct{ error }

func (usage) Is(target error) bool { return target == ErrUsage }
func (u usage) Unwrap() error      { return u.error }

// Globals are the flags of every command.
type Globals struct {
	Root   string
	Socket string
	JSON   bool
}

// Host is the host of --root.
func (g *Globals) Host() *host.Host { return host.New(g.Root) }

// Reader reads the pins, or asks weir serve by its socket.
func (g *Globals) Reader() host.Reader { return g.Host().Reader(g.Socket) }

// JSONFlag gives a command the flag --json.
func JSONFlag(c *cobra.Command, g *Globals) {
	c.Flags().BoolVar(&g.JSON, "json", false, "print JSON")
}
