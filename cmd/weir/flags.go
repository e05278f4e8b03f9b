// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	fmt "github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/internal/suggest"
)

// flagWants maps a flag's type (Go's or pflag's) to its accepted values. Other types describe their values themselves.
var flagWants = map[string]string{"int": "a whole number", "int32": "a whole number", "int64": "a whole number", "intSlice": "whole numbers, like 1,2",
	"uint": "a whole number, 0 or more", "uint16": "a whole number from 0 to 65535", "uint32": "a whole number, 0 or more", "uint64": "a whole number, 0 or more",
	"float64": "a number", "bool": "true or false", "duration": "a time like 90s or 5m"}

// flagError replaces the messages of Go's parsers by the accepted values of the flag, and suggests a flag for an unknown one.
func flagError(cmd *cobra.Command, err error) error {
	if unknown, ok := errors.AsType[*pflag.NotExistError](err); ok {
		var names []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
		if near := suggest.Nearest(unknown.GetSpecifiedName(), names); near != "" {
			return fmt.Errorf("%w; did you mean --%s?", err, near)
		}
		return err
	}
	bad, ok := errors.AsType[*pflag.InvalidValueError](err)
	if !ok {
		return err
	}
	cause := errors.Unwrap(bad)
	if help, ok := errors.AsType[errHelp](cause); ok {
		return help.error
	}
	_, number := errors.AsType[*strconv.NumError](cause)
	wants := flagWants[bad.GetFlag().Value.Type()]
	if wants == "" || !number && !strings.HasPrefix(cause.Error(), "time: ") {
		return err
	}
	if errors.Is(cause, strconv.ErrRange) {
		wants = "a smaller number"
	}
	return fmt.Errorf("invalid argument %q for %q flag: want %s", bad.GetValue(), "--"+bad.GetFlag().Name, wants)
}

// helpFlag is the --help flag of a group command. It rejects an unknown subcommand, as the command does without --help.
type helpFlag struct {
	pflag.Value
	of *cobra.Command
}

// errHelp wraps an error of a helpFlag.
type errHelp struct{ error }

// Set implements pflag.Value. pflag has parsed the words before the flag by then.
func (h helpFlag) Set(text string) error {
	if err := unknownCommand(h.of, h.of.Flags().Args()); err != nil {
		return errHelp{err}
	}
	return h.Value.Set(text)
}

// checkHelp makes --help of a group command reject unknown subcommands.
func checkHelp(c *cobra.Command) {
	c.InitDefaultHelpFlag()
	f := c.Flags().Lookup("help")
	f.Value = helpFlag{f.Value, c}
}
