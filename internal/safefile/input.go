// SPDX-License-Identifier: Apache-2.0

package safefile

import (
	"fmt"
	"io"
	"os"
)

// Input reads a file that a command line names: of any kind, a pipe as a shell's <(command) too; "-" is standard input. The
// name is for errors about the contents. More than max bytes are an error: a device may have no end.
func Input(path string, max int64) (name string, data []byte, err error) {
	name, f := path, os.Stdin
	if path == "-" {
		name = "standard input"
	} else {
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
