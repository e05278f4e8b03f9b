// SPDX-License-Identifier: Apache-2.0

package secret

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// directory is the environment variable of systemd with the directory of a unit's credentials
// (systemd.exec(5), LoadCredential=).
const directory = "CREDENTIALS_DIRECTORY"

// ErrNoCredentials is wrapped by errors about credentials outside a unit with credentials.
var ErrNoCredentials = errors.New("$" + directory + " is not set")

// Locate returns the path of a file named in a configuration. The form credential:NAME is the
// credential NAME of this process's unit, all else a path.
func Locate(name string) (string, error) {
	credential, ok := strings.CutPrefix(name, "credential:")
	if !ok {
		return name, nil
	}
	// The rules are systemd's (credential_name_valid). A name with a slash would leave the directory.
	if credential == "" || credential == "." || credential == ".." || len(credential) > 255 || strings.ContainsAny(credential, "/:") {
		return "", fmt.Errorf("%q is no credential: want credential:NAME, with neither slash nor colon in NAME", name)
	}
	dir := os.Getenv(directory)
	if !filepath.IsAbs(dir) {
		return "", fmt.Errorf("%s: %w: %s", name, ErrNoCredentials, remedy(credential))
	}
	path := filepath.Join(dir, credential)
	if _, err := os.Lstat(path); errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("%s: the unit has no such credential: %s", name, remedy(credential))
	}
	return path, nil
}

func remedy(credential string) string {
	return fmt.Sprintf("add LoadCredential=%s:/path/of/the/file to the section [Service] of its unit (systemctl edit), and restart it", credential)
}
