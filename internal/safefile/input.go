// SPDX-License-Identifier: Apache-2.0

package safefile

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync/atomic"
	"time"
)

// tellAfter is the wait before Input reports it.
var tellAfter = time.Second

// onWait is called with the reason of the wait.
var onWait atomic.Pointer[func(text string)]

// OnWait makes Input call tell once per file after a wait of a second. A FIFO may have no writer.
func OnWait(tell func(text string)) { onWait.Store(&tell) }

func tellWait(name string) {
	text := "waiting for " + name
	if info, err := os.Stat(name); err == nil && info.Mode().Type() == fs.ModeNamedPipe {
		text = "waiting for a writer of FIFO " + name
	}
	if tell := onWait.Load(); tell != nil {
		(*tell)(text)
	}
}

// Input reads a file named on the command line, of any kind, including a pipe such as a shell's
// <(command). "-" is standard input. The returned name is for errors about the contents. More than
// max bytes are an error, because a device may be endless.
func Input(path string, max int64) (name string, data []byte, err error) {
	name, f := path, os.Stdin
	if path == "-" {
		name = "standard input"
	}
	waits := time.AfterFunc(tellAfter, func() { tellWait(name) })
	defer waits.Stop()
	if path != "-" {
		if f, err = os.Open(path); err != nil {
			return name, nil, err
		}
		defer f.Close()
	}
	data, err = io.ReadAll(io.LimitReader(f, max+1))
	if err != nil {
		return name, nil, err
	}
	if int64(len(data)) > max {
		return name, nil, fmt.Errorf("%s: more than %d MiB: is this the right file?", name, max>>20)
	}
	return name, data, nil
}
