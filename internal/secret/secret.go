// SPDX-License-Identifier: Apache-2.0

// Package secret reads keys from files.
package secret

import (
	"fmt"
	"os"
)

// Read returns what a file holds, at most so many bytes: want says of what. Nobody but its owner may be able to read or write it.
func Read(path string, most int64, want string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() || st.Size() > most {
		return nil, fmt.Errorf("%s is no key: %s", path, want)
	}
	if st.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("others than its owner may read %s, or write it: chmod 600 %s", path, path)
	}
	text := make([]byte, st.Size())
	if _, err := f.ReadAt(text, 0); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return text, nil
}
