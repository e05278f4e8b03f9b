// SPDX-License-Identifier: Apache-2.0

// Package secret reads keys from files.
package secret

import (
	"errors"
	"fmt"

	"github.com/weir-project/weir/internal/safefile"
)

// Read returns the contents of a file, at most most bytes. want describes the expected contents.
// Only the owner may have access to the file.
func Read(path string, most int64, want string) ([]byte, error) {
	return read(path, most, want, 0o077, "600")
}

// ReadTLS returns the private key of a certificate, in PEM. The file's group may have read access,
// as for Debian's ssl-cert.
func ReadTLS(path string) ([]byte, error) {
	return read(path, 1<<20, "a private key in PEM", 0o037, "640")
}

func read(path string, most int64, want string, others uint32, chmod string) ([]byte, error) {
	f, err := safefile.Read(path, most)
	if errors.Is(err, safefile.ErrRefused) {
		return nil, fmt.Errorf("%s is no key: %s: %w", path, want, err)
	}
	if err != nil {
		return nil, err
	}
	if uint32(f.Mode.Perm())&others != 0 {
		return nil, fmt.Errorf("users other than its owner have access to %s: chmod %s %s", path, chmod, path)
	}
	return f.Data, nil
}
