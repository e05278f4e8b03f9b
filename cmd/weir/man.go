// SPDX-License-Identifier: Apache-2.0

//go:build man

package main

import (
	"os"
	"strconv"
	"time"

	"github.com/weir-project/weir/cmd/weir/manpages"
	fmt "github.com/weir-project/weir/internal/printable"
)

// A weir built with this tag writes the man pages of its commands into a directory and ends: weir man DIR. The product
// itself needs no generator.
func init() {
	instead = func() {
		if len(os.Args) != 3 || os.Args[1] != "man" {
			return
		}
		if err := manpages.Write(newCommand(), os.Args[2], version, manDate()); err != nil {
			fmt.Fprintln(os.Stderr, "weir man:", err)
			os.Exit(exitFailed)
		}
		os.Exit(0)
	}
}

// manDate is the date of the release (SOURCE_DATE_EPOCH, seconds since 1970), so two builds give the same pages.
func manDate() time.Time {
	seconds, _ := strconv.ParseInt(os.Getenv("SOURCE_DATE_EPOCH"), 10, 64)
	return time.Unix(seconds, 0).UTC()
}
